"""Rewards: what turns a completion into a score. One module per kind; `graders` picks each task's."""
