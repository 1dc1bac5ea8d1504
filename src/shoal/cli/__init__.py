"""The command line: arguments in, exit status out. Every command is in `arguments`; `main` maps it to what it does."""

from shoal.cli.main import main

__all__ = ["main"]
