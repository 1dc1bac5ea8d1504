"""Inference engines: their interface, the torch engine with its scheduler, vLLM, and the self-test of exactness."""
