"""Benchmarks of what runs learn, and of how the age of rollouts, length limits and precision change it."""
