"""Brings a published version to a folder: sources, downloads, the local cache, and updates in place."""
