"""Benchmarks of how weights travel: by deltas, by SHARDCAST and by other ways to send a file."""
