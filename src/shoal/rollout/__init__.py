"""Untrusted generation: a worker loop, the engine protocol and the default engine."""
