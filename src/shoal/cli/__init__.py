"""The command line: arguments in, exit status out. `main` maps each command's name to its module."""

from shoal.cli.main import main

__all__ = ["main"]
