"""The command line turns arguments into an exit status. `main` maps each command's name to its module.

training, nodes, serve, evals, check   the commands; pool/ and audit/ are groups of their own
roles              start a role that computes                  origin_and_relay   start the origin or a relay
launch/            `shoal run`: every role on one machine      preflight/         checks before a run
"""

from shoal.cli.main import main

__all__ = ["main"]
