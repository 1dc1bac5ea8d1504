"""Every command by its name, and every error by its exit status.

    shoal run CONFIG                     everything on this machine; `prepare` and `clean` go with it
    shoal pool init CONFIG --dir DIR     a pool of several machines: the coordinator's folder and all invites
    shoal pool up DIR                    its trusted roles, all on this machine, on one screen
    shoal coordinator --dir DIR          its control plane; `invite`, `evict`, `drain`, `readmit`; `status`, `backup`
    shoal discover URL                   which run is there, and may this machine join it?
    shoal learner|origin|relay|worker|validator|evaluator --join INVITE --dir DIR
    shoal origin PATH, shoal relay --upstream URL, shoal fetch URL    SHARDCAST alone, for any large files
    shoal check [CONFIG]                 will a run work here, how long, how much memory and disk, what to do
    shoal config, verify, calibrate, plot    look at a config, a submission, this machine's numerics, metrics
    shoal audit RUN                      check a stopped run again, from its ledger and files; `ledger` shows the chain
    shoal stake ACTION                   stake on a worker; an operator's contract on a chain
    shoal dashboard FOLDER|URL           watch a run in a browser; `shoal report FOLDER` writes it as one HTML file
    shoal grade CONFIG COMPLETIONS       score completions as a run would
    shoal serve RUN|MODEL                an OpenAI-compatible endpoint and a chat page; `verify-reply` recomputes a reply
    shoal eval SUITE,... --model MODEL   measure models on public benchmarks
    shoal filter CONFIG --out DIR        pass rates of training tasks, and which are worth training on
    shoal sft [CONFIG]                   supervised fine-tuning on conversations (without a config: makes bundled:tiny)
    shoal pretrain CONFIG                training on plain text, alone or as one of several sites
    shoal meet CONFIG --dir DIR          where these sites meet

Exit status: 0 done, 1 failed (verify: rejected; audit: a broken link), 2 wrong usage or configuration, or something that
was named is not there (verify: unreadable), 3 evicted, 4 a node or the coordinator failed for a reason that a restart
does not fix, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from shoal import __version__
from shoal.cli import (
    backup,
    check,
    dashboard,
    discover,
    evals,
    filter,
    grade,
    meet,
    nodes,
    pool,
    pretrain,
    run,
    serve,
    sft,
    shardcast,
    stake,
    tools,
)
from shoal.cli.arguments import USAGE, Parser, say
from shoal.cli.audit import commands as audit
from shoal.cli.nodes import EVICTED, ROLES
from shoal.errors import ShoalError, UserError, restart_helps

DONE, FAILED, LASTING, INTERRUPTED = 0, 1, 4, 130
__all__ = ["COMMANDS", "DONE", "EVICTED", "FAILED", "INTERRUPTED", "LASTING", "USAGE", "main"]

COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "run": run.run,
    "prepare": run.prepare,
    "clean": run.clean,
    "pool": pool.pool,
    "coordinator": pool.coordinator,
    "invite": pool.invite,
    "evict": pool.evict,
    "drain": pool.drain,
    "readmit": pool.readmit,
    "status": pool.status,
    "backup": backup.backup,
    **dict.fromkeys(ROLES, nodes.node),
    "origin": nodes.origin,
    "relay": nodes.relay,
    "fetch": shardcast.run_fetch,
    "discover": discover.discover,
    "check": check.check,
    "config": tools.config,
    "verify": tools.verify,
    "calibrate": tools.calibrate,
    "plot": tools.plot,
    "audit": audit.audit,
    "ledger": audit.ledger,
    "stake": stake.stake,
    "dashboard": dashboard.dashboard,
    "report": dashboard.report,
    "grade": grade.grade,
    "filter": filter.run_filter,
    "sft": sft.run_sft,
    "pretrain": pretrain.run_pretrain,
    "meet": meet.run_meet,
    "eval": evals.run_eval,
    "serve": serve.serve,
    "verify-reply": serve.verify_reply,
}


def main(argv: list[str] | None = None) -> int:
    arguments = command_line().parse_args(argv)
    try:
        return COMMANDS[arguments.command_name](arguments) or DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the one place where an error becomes a message and a status
        status = _status_of(error, arguments)
        if status is None:
            raise
        words = f"nothing is at {error.filename}" if isinstance(error, FileNotFoundError) and error.filename else error
        say(f"shoal {arguments.command_name}: {words}", sys.stderr)
        return status


def command_line() -> argparse.ArgumentParser:
    """The parser of `shoal`; it stores the command's name as `command_name`."""
    parser = Parser(prog="shoal", description="Reinforcement learning on machines nobody has to trust.")
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(dest="command_name", required=True, metavar="COMMAND")
    for family in (run, pool, discover, nodes, tools, audit, stake, grade, evals, filter, serve):
        family.add_commands(commands)
    for family in (check, backup, dashboard):
        family.add_commands(commands)
    shardcast.fetch_arguments(commands.add_parser("fetch", help="download published versions from relays to a folder"))
    sft.sft_arguments(
        commands.add_parser("sft", help="fine-tune on conversations; without a config: make bundled:tiny")
    )
    pretrain.pretrain_arguments(commands.add_parser("pretrain", help="train on plain text"))
    meet.meet_arguments(commands.add_parser("meet", help="where the sites of one training meet"))
    return parser


def _status_of(error: Exception, arguments: argparse.Namespace) -> int | None:
    """The exit status of an error that its message explains; None for one that needs its traceback."""
    if isinstance(error, UserError) or _is_missing(error, arguments):
        return USAGE
    if arguments.command_name in ("coordinator", *ROLES) and not restart_helps(error):
        return LASTING
    return FAILED if isinstance(error, (ShoalError, OSError)) else None


def _is_missing(error: Exception, arguments: argparse.Namespace) -> bool:
    """Whether a file or folder that was named is not there, or not of its kind."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) or error.filename is None:
        return False
    path = Path(os.fsdecode(error.filename))
    values = [each for value in vars(arguments).values() for each in (value if isinstance(value, list) else [value])]
    named = [Path(value) for value in values if isinstance(value, (str, Path)) and str(value)]
    return path in named or any(each in path.parents and not each.is_dir() for each in named)
