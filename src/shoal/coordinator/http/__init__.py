"""The coordinator's HTTP server: its routes, files and public reports."""
