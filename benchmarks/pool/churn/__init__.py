"""Whole runs under random faults (`python -m benchmarks.pool.churn`)."""
