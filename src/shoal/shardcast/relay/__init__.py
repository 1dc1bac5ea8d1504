"""Mirrors the newest versions of upstream servers into a store, and serves shards while they arrive."""
