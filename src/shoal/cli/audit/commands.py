"""Commands that read a run's ledger: `shoal audit` believes nothing, `shoal ledger` shows the chain."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random, SystemRandom

from shoal.cli.arguments import Commands, UsageError, say, whole

MOST = whole(0, 1_000_000)


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    audit_ = commands.add_parser("audit", help="check all of a stopped run again, from its ledger and files")
    _takes_run(audit_)
    audit_.add_argument("--head", action="append", default=[], metavar="SEQ:DIGEST", help="a head that you know")
    audit_.add_argument(
        "--unsealed", action="store_true", help="accept a run that is still going, or whose coordinator was killed"
    )
    audit_.add_argument("--rerun", type=MOST, default=1, metavar="N", help="steps to train again (default: 1)")
    audit_.add_argument(
        "--proofs", type=MOST, default=4, metavar="N", help="submissions of each to judge again (default: 4)"
    )
    audit_.add_argument(
        "--rpc",
        default="",
        metavar="URL",
        help="a node of the chain that holds the run's contract (default: the run's)",
    )
    audit_.add_argument("--seed", type=int, help="draw the steps and submissions by this number (default: by chance)")

    ledger_ = commands.add_parser("ledger", help="verify and show a run's ledger")
    _takes_run(ledger_)
    ledger_.add_argument("--after", type=MOST, default=0, metavar="SEQ", help="show the entries after this one only")
    ledger_.add_argument("--kind", default="", help="show the entries of this kind only")
    ledger_.add_argument("--out", type=Path, metavar="FILE", help="write the whole ledger there, as JSON lines")


def _takes_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", type=Path, help="the folder of a run, or of its coordinator")
    command.add_argument(
        "--key", default="", help="the coordinator's key, if you know it (default: as the ledger says)"
    )
    command.add_argument("--ledger", type=Path, metavar="FILE", help="read the ledger from this export")


def _check_there(arguments: argparse.Namespace) -> None:
    """Raise UsageError if what was named is not there: that is no broken link."""
    if not arguments.run.is_dir():
        raise UsageError(f"no folder at {arguments.run}: name the folder of a run, or of its coordinator")
    if arguments.ledger and not arguments.ledger.is_file():
        raise UsageError(f"no file at {arguments.ledger}: `shoal ledger RUN --out FILE` writes one")


def audit(arguments: argparse.Namespace) -> int:
    _check_there(arguments)
    from shoal.cli.audit.audit import Asked
    from shoal.cli.audit.audit import audit as check
    from shoal.cli.audit.opened import BrokenError

    asked = Asked(
        key=arguments.key,
        heads=arguments.head,
        export=arguments.ledger,
        unsealed=arguments.unsealed,
        rerun=arguments.rerun,
        proofs=arguments.proofs,
        rpc=arguments.rpc,
    )
    random = SystemRandom() if arguments.seed is None else Random(arguments.seed)
    try:
        check(arguments.run, asked, random, say)
    except BrokenError as error:
        say(f"BROKEN {error}")
        return 1
    say("the audit found no broken link")
    return 0


def ledger(arguments: argparse.Namespace) -> None:
    _check_there(arguments)
    from shoal.cli.audit.opened import open_run
    from shoal.ledger.chain import write_export

    opened = open_run(arguments.run, key=arguments.key, export=arguments.ledger)
    if arguments.out:
        write_export(opened.chain, arguments.out)
    for entry in opened.chain:
        if not arguments.out and entry.seq > arguments.after and arguments.kind in ("", entry.kind):
            line = {"seq": entry.seq, "time_s": entry.time_s, "kind": entry.kind, "body": json.loads(entry.body)}
            say(json.dumps(line))
    head = opened.chain[-1]
    say(f"{len(opened.chain)} entries, signed by {opened.key}; head {head.seq}:{head.digest}", sys.stderr)
