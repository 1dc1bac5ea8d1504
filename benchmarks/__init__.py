"""What the pages claim, measured: `python -m benchmarks.FOLDER.NAME`, run in the root of the repository (README.md)."""
