"""Measures a policy on tasks it never trained on, and tasks by a policy."""
