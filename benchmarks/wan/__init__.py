"""What benchmarks/wan.py runs on and runs: an emulated network, and a class for each system that sends a file over it."""
