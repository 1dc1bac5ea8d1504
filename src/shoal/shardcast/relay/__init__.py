"""Mirrors a store from upstream, and passes shards on while they arrive."""
