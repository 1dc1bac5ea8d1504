"""Run the command that the arguments name, and turn each error into an exit status.

0      done
1      failed; for an audit: something is wrong with the run or the file
2      wrong usage or configuration, or a file named in the arguments is missing
3      the node was evicted
4      a node or the coordinator failed for a reason that a restart does not fix
130    interrupted
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shoal import __version__
from shoal.cli import check, evals, nodes, serve, training
from shoal.cli.arguments import USAGE, Action, Parser, say
from shoal.cli.audit import commands as audit
from shoal.cli.launch.process import show_title
from shoal.cli.nodes import EVICTED, ROLES
from shoal.cli.pool import commands as pool
from shoal.errors import ShoalError, UserError, disk_is_full, restart_helps

DONE, FAILED, LASTING, INTERRUPTED = 0, 1, 4, 130
__all__ = ["DONE", "EVICTED", "FAILED", "INTERRUPTED", "LASTING", "USAGE", "main"]

GROUPS = {  # the commands as `shoal --help` groups them
    "Start": ["run", "sft", "pretrain"],
    "Look": ["dashboard", "serve"],
    "Pool": ["pool", "coordinator", "learner", "origin", "relay", "worker", "validator", "evaluator"],
    "Check": ["check", "config", "calibrate", "audit", "filter", "eval"],
    "Share files": ["origin", "relay", "fetch"],
}


def main(argv: list[str] | None = None) -> int:
    if argv is None:
        show_title(sys.argv[1:])
    arguments, unknown = command_line().parse_known_args(argv)
    if unknown:
        Parser(prog=arguments.prog).error(f"unrecognized arguments: {' '.join(unknown)}")
    return answer(arguments.call, arguments)


def answer(call: Action, arguments: argparse.Namespace) -> int:
    """Run a command and return its exit status; print an explained error as one line."""
    try:
        return call(arguments) or DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the one place where an error becomes a message and a status
        status = _status_of(error, arguments)
        if status is None:
            raise
        missing = error.filename if isinstance(error, FileNotFoundError) else None
        message = f"no such file or folder: {missing}" if missing else f"{error}"
        if disk_is_full(error) and not isinstance(error, ShoalError):
            message += "; free space there, then start again"
        say(f"shoal {arguments.command_name}: {message}", sys.stderr)
        return status


def command_line() -> argparse.ArgumentParser:
    """Return the parser of `shoal`. It stores the command's name as `command_name` and its function as `call`."""
    parser = Parser(
        prog="shoal",
        usage="shoal COMMAND ...",
        description="Reinforcement learning on machines nobody has to trust.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(
        dest="command_name", required=True, metavar="COMMAND", prog="shoal", help=argparse.SUPPRESS
    )
    for family in (training, serve, pool, nodes, check, audit, evals):
        family.add_commands(commands)
    groups = [
        "\n".join([f"{group}:", *(f"  {name:12} {commands.choices[name].description}" for name in names)])
        for group, names in GROUPS.items()
    ]
    parser.epilog = "\n\n".join([*groups, "`shoal COMMAND --help` shows a command's arguments and an example."])
    return parser


def _status_of(error: Exception, arguments: argparse.Namespace) -> int | None:
    """Return the exit status for an error that its message explains; None for a bug, which needs a traceback."""
    if isinstance(error, UserError) or _is_missing(error, arguments):
        return USAGE
    if arguments.command_name in ("coordinator", *ROLES) and not restart_helps(error):
        return LASTING
    return FAILED if isinstance(error, (ShoalError, OSError)) else None


def _is_missing(error: Exception, arguments: argparse.Namespace) -> bool:
    """Return whether a file or folder named in the arguments is missing, or of the wrong kind."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) or error.filename is None:
        return False
    path = Path(os.fsdecode(error.filename))
    values = [each for value in vars(arguments).values() for each in (value if isinstance(value, list) else [value])]
    named = [Path(value) for value in values if isinstance(value, (str, Path)) and str(value)]
    return path in named or any(each in path.parents and not each.is_dir() for each in named)
