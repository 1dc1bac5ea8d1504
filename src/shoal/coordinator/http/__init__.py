"""The coordinator as a server: its routes, files, open reports; one run or several at a listener."""
