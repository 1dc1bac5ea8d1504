"""Untrusted generation: the worker's loop, and the submissions it produces."""
