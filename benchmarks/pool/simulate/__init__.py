"""Simulate a whole pool as queues (`python -m benchmarks.pool.simulate`)."""
