"""The emulated network of benchmarks/wan.py, and a class for each system that sends a file over it."""
