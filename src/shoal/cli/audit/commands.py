"""`shoal audit RUN|FILE|REPLY` believes nothing: it checks a run's ledger and files, a submission, or a reply again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random, SystemRandom

from shoal import config as config_module
from shoal.cli.arguments import Commands, add_command, say, takes_threads, whole
from shoal.cli.serve import audit_reply
from shoal.errors import UserError

MOST = whole(0, 1_000_000)
PARQUET = b"PAR1"  # the first bytes of such a file


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    audit_ = add_command(
        commands, "audit", "check a stopped run, a submission or a reply again, from its files alone", "runs/quickstart"
    )
    audit_.add_argument(
        "what",
        type=Path,
        metavar="RUN|FILE|REPLY",
        help="the folder of a run or of its coordinator, a submission (Parquet), or a reply of `shoal serve` (JSON)",
    )
    takes_threads(audit_)
    run_ = audit_.add_argument_group("of a run")
    run_.add_argument("--key", default="", help="the coordinator's key, if you know it (default: as the ledger says)")
    run_.add_argument("--ledger", type=Path, metavar="FILE", help="read the ledger from this export")
    run_.add_argument("--head", action="append", default=[], metavar="SEQ:DIGEST", help="a head that you know")
    run_.add_argument(
        "--unsealed", action="store_true", help="accept a run that is still going, or whose coordinator was killed"
    )
    run_.add_argument("--rerun", type=MOST, default=1, metavar="N", help="steps to train again (default: 1)")
    run_.add_argument(
        "--proofs", type=MOST, default=4, metavar="N", help="submissions of each to judge again (default: 4)"
    )
    run_.add_argument(
        "--rpc",
        default="",
        metavar="URL",
        help="a node of the chain that holds the run's contract (default: the run's)",
    )
    run_.add_argument("--seed", type=int, help="draw the steps and submissions by this number (default: by chance)")
    run_.add_argument("--entries", action="store_true", help="only verify the ledger, and show its entries")
    run_.add_argument("--after", type=MOST, default=0, metavar="SEQ", help="with --entries: those after this one")
    run_.add_argument("--kind", default="", help="with --entries: those of this kind")
    run_.add_argument("--export", type=Path, metavar="FILE", help="only verify the ledger, and write it as JSON lines")
    file_ = audit_.add_argument_group("of a submission")
    file_.add_argument("--run", type=Path, metavar="RUN", help="folder of the run it is of: its config and weights")
    file_.add_argument("--config", type=Path, help="instead of --run: the resolved config")
    file_.add_argument("--weights", type=Path, help="folder of the policy version that the file names")
    reply_ = audit_.add_argument_group("of a reply")
    reply_.add_argument("--model", metavar="RUN|MODEL", help="the weights to recompute with, which you trust")


def audit(arguments: argparse.Namespace) -> int:
    """Audit what is named, by what it is: a folder, a Parquet file, or else a reply."""
    if arguments.what.is_dir():
        return _ledger(arguments) if arguments.entries or arguments.export else _run(arguments)
    data = arguments.what.read_bytes()
    if data[:4] == PARQUET or arguments.run or arguments.config:
        return _submission(data, arguments)
    if not arguments.model:
        raise UserError(f"{arguments.what} is neither a run's folder nor a submission; for a reply, also give --model")
    return audit_reply(data, arguments.model, arguments.threads)


def _check_there(arguments: argparse.Namespace) -> None:
    """Raise UserError if a named file is missing; a missing argument is not a broken link."""
    if arguments.ledger and not arguments.ledger.is_file():
        raise UserError(f"no file at {arguments.ledger}: `shoal audit RUN --export FILE` writes one")


def _run(arguments: argparse.Namespace) -> int:
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
        check(arguments.what, asked, random, say)
    except BrokenError as error:
        say(f"BROKEN {error}")
        return 1
    say("the audit found no broken link")
    return 0


def _ledger(arguments: argparse.Namespace) -> int:
    _check_there(arguments)
    from shoal.cli.audit.opened import open_run
    from shoal.ledger.chain import write_export

    opened = open_run(arguments.what, key=arguments.key, export=arguments.ledger)
    if arguments.export:
        write_export(opened.chain, arguments.export)
    for entry in opened.chain:
        if not arguments.export and entry.seq > arguments.after and arguments.kind in ("", entry.kind):
            line = {"seq": entry.seq, "time_s": entry.time_s, "kind": entry.kind, "body": json.loads(entry.body)}
            say(json.dumps(line))
    head = opened.chain[-1]
    say(f"{len(opened.chain)} entries, signed by {opened.key}; head {head.seq}:{head.digest}", sys.stderr)
    return 0


def _submission(data: bytes, arguments: argparse.Namespace) -> int:
    path = arguments.config or (arguments.run / "config.toml" if arguments.run else None)
    if path is None:
        raise UserError("name the run the file belongs to: --run DIR, or --config CONFIG and --weights FOLDER")
    settings = config_module.load(path)
    from shoal.model import dtype
    from shoal.store.rollouts import RolloutFileError
    from shoal.validator import by_hand

    try:
        header = by_hand.read_header(data, settings)
        weights = arguments.weights or _weights(arguments.run or path.parent, header.policy_version)
        picked, _ = dtype.pick(settings.model.dtype, settings.model.device)
        status, lines = by_hand.verify(data, header, settings, weights, picked)
    except RolloutFileError as error:
        say(f"unreadable: {error}")
        return by_hand.UNREADABLE
    say("\n".join(lines))
    return status


def _weights(run: Path, version: int) -> Path:
    from shoal.validator import by_hand

    try:
        return by_hand.find_weights(run, version)
    except FileNotFoundError as error:  # nothing was checked, which is not a rejection
        raise UserError(str(error)) from error
