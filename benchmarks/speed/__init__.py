"""Benchmarks of how fast each part is, alone and compared with other systems."""
