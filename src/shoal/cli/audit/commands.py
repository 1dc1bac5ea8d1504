"""`shoal audit RUN|FILE|REPLY`: check a run's ledger and files, a submission, or a reply of the chat page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING

from shoal import config as config_module
from shoal.cli.arguments import PUBLIC_KEY, Commands, add_command, add_threads, say, whole
from shoal.cli.serve import audit_reply
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.store.rollouts import Header

COUNT = whole(0, 1_000_000)
NOT_COMPARED = 5  # exit status: nothing is broken, but something that matters was not compared
PARQUET = b"PAR1"  # the first bytes of a Parquet file


def add_commands(commands: Commands) -> None:
    what = "check a stopped run, a submission or a reply, using only its files"
    parser = add_command(commands, "audit", audit, what, "runs/quickstart")
    kinds = "the folder of a run or of its coordinator, a submission (Parquet), or a reply of `shoal serve` (JSON)"
    parser.add_argument("what", type=Path, metavar="RUN|FILE|REPLY", help=kinds)
    add_threads(parser)
    add = parser.add_argument_group("for a run").add_argument
    add("--key", default="", help="the coordinator's key, if you know it (default: the key in the ledger)")
    add("--ledger", type=Path, metavar="FILE", help="read the ledger from this export")
    head = "a head that you recorded earlier; the ledger must contain it"
    add("--head", action="append", default=[], metavar="SEQ:DIGEST", help=head)
    add("--unsealed", action="store_true", help="accept a run that is in progress, or whose coordinator was killed")
    add("--rerun", type=COUNT, default=1, metavar="N", help="steps to train again (default: 1)")
    proofs = "submissions to judge again for each step that is trained again (default: 4)"
    add("--proofs", type=COUNT, default=4, metavar="N", help=proofs)
    node = "URL of a node of the contract's chain (default: from the run's config)"
    add("--rpc", default="", metavar="URL", help=node)
    add("--seed", type=int, help="seed for the choice of steps and submissions (default: random)")
    add("--export", type=Path, metavar="FILE", help="only verify the ledger, and write it as JSON lines")
    add = parser.add_argument_group("for a submission").add_argument
    add("--run", type=Path, metavar="RUN", help="folder of the submission's run or pool")
    add("--weights", type=Path, help="folder of the submission's policy version (default: found in --run)")
    reply = parser.add_argument_group("for a reply")
    reply.add_argument("--model", metavar="RUN|MODEL", help="weights that you trust, with which to recompute the reply")


def audit(arguments: argparse.Namespace) -> int:
    """Audit a folder as a run, a Parquet file as a submission, and any other file as a reply."""
    if arguments.what.is_dir():
        if arguments.key and not PUBLIC_KEY.fullmatch(arguments.key):
            raise UserError(f"--key {arguments.key[:80]!r} is not a public key, which has 64 hex digits")
        if arguments.ledger and not arguments.ledger.is_file():  # a usage error, not a broken link
            raise UserError(f"no file at {arguments.ledger}: `shoal audit RUN --export FILE` writes one")
        _check_run(arguments)
        return _export(arguments) if arguments.export else _run(arguments)
    data = arguments.what.read_bytes()
    if data[:4] == PARQUET or arguments.run:
        return _submission(data, arguments)
    if not arguments.model:
        raise UserError(f"{arguments.what} is neither a run's folder nor a submission; for a reply, also give --model")
    return audit_reply(data, arguments.model, arguments.threads)


def _check_run(arguments: argparse.Namespace) -> None:
    """Raise UserError if a head is malformed, or if the folder has no database and no coordinator was started there."""
    from shoal.cli.audit.run import DATABASE, coordinator_folder
    from shoal.ledger.chain import Head, LedgerError
    from shoal.protocol.invite import Address

    try:
        for head in arguments.head:
            Head.parse(head, run="")
    except LedgerError as error:
        raise UserError(f"--head: {error}") from error
    if not arguments.ledger and not (coordinator_folder(arguments.what) / DATABASE).is_file():
        Address.read(arguments.what)


def _run(arguments: argparse.Namespace) -> int:
    from shoal.cli.audit.audit import audit as check
    from shoal.cli.audit.run import BrokenError, Checks

    checks = Checks()
    try:
        check(
            arguments.what,
            say,
            SystemRandom() if arguments.seed is None else Random(arguments.seed),
            key=arguments.key,
            heads=arguments.head,
            export=arguments.ledger,
            unsealed=arguments.unsealed,
            rerun=arguments.rerun,
            proofs=arguments.proofs,
            rpc=arguments.rpc,
            checks=checks,
        )
    except BrokenError as error:
        say(f"BROKEN {error}")
        say(checks.count(failed=1))
        return 1
    say("the audit found no broken link" + (", but it could not compare all that matters" if checks.needed else ""))
    say(checks.count())
    return NOT_COMPARED if checks.needed else 0


def _export(arguments: argparse.Namespace) -> int:
    from shoal.cli.audit.run import open_run
    from shoal.ledger.chain import write_export

    opened = open_run(arguments.what, key=arguments.key, export=arguments.ledger)
    write_export(opened.chain, arguments.export)
    head = opened.chain[-1]
    say(f"{len(opened.chain)} entries, signed by {opened.key}; head {head.seq}:{head.digest}")
    return 0


def _submission(data: bytes, arguments: argparse.Namespace) -> int:
    if arguments.run is None:
        raise UserError("name the folder of the submission's run or pool: --run DIR")
    if not (arguments.run / "config.toml").is_file():
        raise UserError(f"{arguments.run} is not a run's folder: it has no config.toml")
    settings = config_module.load(arguments.run / "config.toml")
    from shoal.model import dtype
    from shoal.store.columns import RolloutFileError
    from shoal.validator import by_hand

    try:
        header = by_hand.read_header(data, settings)
        weights = arguments.weights or by_hand.find_weights(arguments.run, header.policy_version)
        by_hand.check_weights(weights, header.policy_version)
        picked, _ = dtype.pick(settings.model.dtype, settings.model.device)
        assigned = _assigned(arguments.run, header)
        if isinstance(assigned, str):
            say(assigned)
            return by_hand.REJECTED
        status, lines = by_hand.verify(data, header, settings, weights, picked, assigned)
    except RolloutFileError as error:
        say(f"unreadable: {error}")
        return by_hand.UNREADABLE
    except FileNotFoundError as error:  # nothing was checked, so the submission is not rejected
        raise UserError(str(error)) from error
    if arguments.weights:
        lines.insert(
            0, f"{weights} is taken for version {header.policy_version}; with other weights the result means nothing"
        )
    say("\n".join(lines))
    return status


def _assigned(run: Path, header: Header) -> Header | str | None:
    """Return the header that an honest file of this task has, by the run's ledger and tables; None without a database.

    Return the reason for a rejection if the run did not assign this task.
    """
    from shoal.cli.audit.run import DATABASE, coordinator_folder
    from shoal.coordinator.submissions import Submissions
    from shoal.ledger.connection import open_sqlite
    from shoal.ledger.table import Ledger

    path, id = coordinator_folder(run) / DATABASE, f"{header.worker[:16]}-{header.submission:06d}"
    if not path.is_file():
        return None
    connection = open_sqlite(path, read_only=True)
    task = Submissions(connection).get(id)
    if task is None:
        return f"rejected: the run in {run} assigned no submission {id}"
    facts = {name: getattr(task, name) for name in ("worker", "step", "nonce", "groups")}
    facts |= {"submission": task.number, "policy_version": task.version, "policy_digest": task.digest}
    started = json.loads(next(Ledger(connection).every_row()).body)
    return header.model_copy(update=facts | {"run": started["run"]})
