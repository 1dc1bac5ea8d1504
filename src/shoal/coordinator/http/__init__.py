"""The coordinator as a server: its routes, files and open reports."""
