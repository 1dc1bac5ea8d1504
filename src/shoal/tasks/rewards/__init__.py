"""Rewards: functions from a completion to a score, one module per kind. `graders` picks the reward of each task."""
