"""How many workers a coordinator serves (`python -m benchmarks.pool.scale`)."""
