"""Rollout files: where they lie (`folder`) and what is in them (`rollouts`)."""
