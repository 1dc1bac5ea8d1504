"""Turns a folder of files into a published version: cut into shards, or as a delta of the previous version."""
