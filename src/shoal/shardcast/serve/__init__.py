"""Serves a store over HTTP: who may read, how fast, and how many connections."""
