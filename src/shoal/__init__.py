"""Shoal: reinforcement learning of language models on machines nobody has to trust."""

__version__ = "0.2.0"
