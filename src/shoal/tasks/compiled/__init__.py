"""The compiled task set: Arrow chunks on disk under their hashes, so that a million tasks need no memory and travel by need.

compiling  sources become chunks and a manifest         spool    rows on their way there, sorted on disk
table      a manifest and its chunks, read as tasks
"""
