"""The emulated network of benchmarks/weights/wan, and a class for each system that sends a file over it."""
