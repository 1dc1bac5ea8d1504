"""Measure what the pages claim. Run `python -m benchmarks.FOLDER.NAME` in the repository's root (README.md)."""
