"""Turns a folder of weights into a published version: cut into shards, or as a delta of the version before."""
