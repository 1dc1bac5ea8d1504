"""Every command, from its arguments to its exit status. Each imports the heavy modules it needs, after its threads are set.

    shoal run CONFIG                     everything on this machine
    shoal coordinator CONFIG --dir DIR   the same roles one by one; each of the others needs only an invite
    shoal invite DIR --role R --name N
    shoal learner|origin|relay|worker|validator|evaluator --join INVITE --dir DIR
    shoal origin PATH, shoal relay --upstream URL, shoal fetch URL    SHARDCAST alone, for any large files
    shoal verify FILE --run DIR          one submission checked by hand, each check in words
    shoal calibrate CONFIG               measure honest work here, and write the validator's limits
    shoal prepare CONFIG                 fetch or convert the model beforehand
    shoal sft [CONFIG]                   supervised fine-tuning on conversations (without one: makes bundled:tiny)
    shoal plot RUN...                    draw the metrics of runs side by side

Exit status: 0 done, 1 failed (verify: rejected), 2 wrong usage or configuration (verify: unreadable), 3 evicted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import config as config_module
from shoal.cli import sft, shardcast
from shoal.cli.arguments import ROLES, command_line
from shoal.config import Config, ConfigError
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.protocol.invite import Invite

DONE, FAILED, USAGE, EVICTED = 0, 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    arguments = command_line().parse_args(argv)
    try:
        return COMMANDS[arguments.command_name](arguments)
    except Exception as error:  # noqa: BLE001 - the one place where an error becomes a message and a status
        status = _status_of(error)
        if status is None:
            raise
        sys.stderr.write(f"shoal {arguments.command_name}: {error}\n")
        return status


def _run(arguments: argparse.Namespace) -> int:
    if bool(arguments.resume) == bool(arguments.config):
        raise ConfigError("say which config to run, or which folder to go on with: shoal run --resume DIR")
    if arguments.resume:
        arguments.config = arguments.resume / "config.toml"
    config = _config(arguments)
    if arguments.dry_run:
        sys.stdout.write(config_module.dumps(config))
        return DONE
    from shoal.launch.swarm import Swarm, stopped_run

    if arguments.resume:
        run, address = stopped_run(arguments.resume)
        return Swarm(config, run, arguments.resume, address).run()
    name = arguments.config.stem
    out = arguments.out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Swarm(config, f"{name}-{config.run.seed}", out).run()


def _prepare(arguments: argparse.Namespace) -> int:
    from shoal.launch.prepare import prepare
    from shoal.model.threads import compute_on

    compute_on(arguments.threads)
    sys.stdout.write(json.dumps(prepare(_config(arguments))) + "\n")
    return DONE


def _sft(arguments: argparse.Namespace) -> int:
    sft.run_sft(arguments)
    return DONE


def _verify(arguments: argparse.Namespace) -> int:
    from shoal.model import dtype
    from shoal.store.rollouts import RolloutFileError
    from shoal.validator import by_hand

    path = arguments.config or (arguments.run / "config.toml" if arguments.run else None)
    if path is None:
        raise ConfigError("say which run the file is of: --run DIR, or --config CONFIG and --weights FOLDER")
    config = config_module.load(path)
    data = arguments.file.read_bytes()
    try:
        header = by_hand.read_header(data, config)
        weights = arguments.weights or by_hand.find_weights(arguments.run or path.parent, header.policy_version)
        picked, _ = dtype.pick(config.model.dtype, config.model.device)
        status, lines = by_hand.verify(data, header, config, weights, picked)
    except RolloutFileError as error:
        sys.stdout.write(f"unreadable: {error}\n")
        return by_hand.UNREADABLE
    sys.stdout.write("\n".join(lines) + "\n")
    return status


def _calibrate(arguments: argparse.Namespace) -> int:
    from shoal.launch.calibrate import calibrate

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    calibrate(_config(arguments), arguments.out, arguments.submissions, arguments.weights, say)
    return DONE


def _plot(arguments: argparse.Namespace) -> int:
    from shoal.tracking.plot import plot

    drawn = plot(arguments.runs, arguments.metrics, arguments.out)
    sys.stdout.write(f"{arguments.out}: {', '.join(drawn)}\n")
    return DONE


def _coordinator(arguments: argparse.Namespace) -> int:
    stop = _begin("coordinator", arguments)
    from shoal.coordinator.service import serve_forever

    config = _config(arguments)
    port = config.coordinator.port if arguments.port is None else arguments.port
    name = arguments.run or arguments.config.stem
    serve_forever(config, name, arguments.dir, port, stop, record_to=arguments.record)
    return DONE


def _invite(arguments: argparse.Namespace) -> int:
    from shoal.coordinator.service import invite_from

    invite = invite_from(arguments.dir, arguments.role, arguments.name, arguments.url, arguments.days)
    sys.stdout.write(invite.encode() + "\n")
    return DONE


def _node(arguments: argparse.Namespace) -> int:
    if not arguments.join:
        return _alone(arguments)
    needed = ["dir", "watch"] if arguments.command_name == "origin" else ["dir"]
    _needs(arguments, needed, "--join")
    stop = _begin(arguments.command_name, arguments)
    from shoal.protocol.invite import read_invite

    invite = read_invite(arguments.join)
    ended = JOINED[arguments.command_name](invite, arguments, stop)
    return EVICTED if ended == "evicted" else DONE


def _learner(invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    from shoal.roles.learner import run_learner

    return run_learner(invite, arguments.dir, arguments.threads, stop)


def _origin(invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    from shoal.roles.origin import run_origin

    return run_origin(invite, arguments.dir, arguments.watch, stop)


def _relay(invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    from shoal.roles.relay import run_relay

    return run_relay(invite, arguments.dir, stop)


def _worker(invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    from shoal.roles.worker import run_worker

    return run_worker(invite, arguments.dir, arguments.threads, stop)


def _validator(invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    from shoal.roles.validator import run_validator

    return run_validator(invite, arguments.dir, arguments.threads, stop)


def _evaluator(invite: Invite, arguments: argparse.Namespace, stop: threading.Event) -> str:
    from shoal.roles.evaluator import run_evaluator

    return run_evaluator(invite, arguments.dir, arguments.threads, stop)


def _alone(arguments: argparse.Namespace) -> int:
    _needs(arguments, ["path"] if arguments.command_name == "origin" else ["upstream", "key"], "no --join")
    stop = _begin(arguments.command_name, arguments)
    run = shardcast.run_origin if arguments.command_name == "origin" else shardcast.run_relay
    run(arguments, stop)
    return DONE


def _fetch(arguments: argparse.Namespace) -> int:
    shardcast.run_fetch(arguments)
    return DONE


def _needs(arguments: argparse.Namespace, names: list[str], given: str) -> None:
    if missing := [name for name in names if not getattr(arguments, name)]:
        raise ConfigError(f"with {given}, {arguments.command_name} also needs {' and '.join(missing)}")


def _config(arguments: argparse.Namespace) -> Config:
    seed = getattr(arguments, "seed", None)
    overrides = arguments.overrides + ([] if seed is None else [f"run.seed={seed}"])
    return config_module.load(arguments.config, overrides, arguments.overlays)


def _begin(name: str, arguments: Any) -> threading.Event:
    from shoal.launch import process

    os.umask(0o077)
    return process.begin(name, threads=getattr(arguments, "threads", 0))


def _status_of(error: Exception) -> int | None:
    """The exit status of an error that a message explains; None for one that needs its traceback."""
    if isinstance(error, ConfigError):
        return USAGE
    return FAILED if isinstance(error, (ShoalError, OSError)) else None


JOINED: dict[str, Callable[[Invite, argparse.Namespace, threading.Event], str]] = {
    "learner": _learner,
    "origin": _origin,
    "relay": _relay,
    "worker": _worker,
    "validator": _validator,
    "evaluator": _evaluator,
}

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "prepare": _prepare,
    "sft": _sft,
    "verify": _verify,
    "calibrate": _calibrate,
    "plot": _plot,
    "coordinator": _coordinator,
    "invite": _invite,
    "fetch": _fetch,
    **dict.fromkeys(ROLES, _node),
}
