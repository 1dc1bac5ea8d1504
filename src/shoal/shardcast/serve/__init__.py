"""Serves a store over HTTP, and limits who may read, how fast, and over how many connections."""
