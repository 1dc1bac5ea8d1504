"""Every command; nothing but arguments. A command imports the heavy modules that it needs, after its threads are set.

    shoal run CONFIG                     everything on this machine
    shoal coordinator CONFIG --dir DIR   the same roles one by one; each of the others needs only an invite
    shoal invite DIR --role R --name N
    shoal learner|origin|relay|worker|validator|evaluator --join INVITE --dir DIR
    shoal origin PATH, shoal relay --upstream URL, shoal fetch URL    SHARDCAST alone, for any large files
    shoal verify FILE --run DIR          one submission checked by hand, each check in words
    shoal calibrate CONFIG               measure honest work here, and write the validator's limits
    shoal prepare CONFIG, shoal sft      fetch, convert or train the model beforehand

Exit status: 0 done, 1 failed (verify: rejected), 2 wrong usage or configuration (verify: unreadable), 3 evicted.
"""

import argparse
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shoal import config as config_module
from shoal import standalone
from shoal.config import Config, ConfigError

DONE, FAILED, USAGE, EVICTED = 0, 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        return code
    except Exception as error:  # noqa: BLE001 - the one place where an error becomes a message and a status
        status = _status_of(error)
        if status is None:
            raise
        sys.stderr.write(f"shoal {arguments.command_name}: {error}\n")
        return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal", description="Reinforcement learning on machines nobody must trust.")
    commands = parser.add_subparsers(dest="command_name", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run everything on this machine")
    _takes_config(run)
    run.add_argument("--seed", type=int, help="overrides run.seed")
    run.add_argument("--out", type=Path, help="folder of this run (default: runs/<config name>-<time>)")
    run.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    run.set_defaults(command=_run)

    prepare = commands.add_parser("prepare", help="fetch the model, measure the dtype; prints both as JSON")
    _takes_config(prepare)
    prepare.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    prepare.set_defaults(command=_prepare)

    sft = commands.add_parser("sft", help="train bundled:tiny by supervised warm-up")
    sft.set_defaults(command=_sft)

    verify = commands.add_parser("verify", help="check one submission by hand")
    verify.add_argument("file", type=Path, help="a submission, as Parquet")
    verify.add_argument("--run", type=Path, help="folder of a run that `shoal run` made: its config and weights")
    verify.add_argument("--config", type=Path, help="instead of --run: the resolved config")
    verify.add_argument("--weights", type=Path, help="folder of the policy version the file names")
    verify.set_defaults(command=_verify)

    calibrate = commands.add_parser("calibrate", help="measure honest work, write the validator's limits")
    _takes_config(calibrate)
    calibrate.add_argument(
        "--out", type=Path, default=Path("calibration"), help="folder of limits.toml and measured.json"
    )
    calibrate.add_argument("--submissions", type=int, default=8, help="for each condition")
    calibrate.add_argument(
        "--weights",
        type=Path,
        nargs="+",
        default=[],
        help="policy versions to measure on (default: the config's model)",
    )
    calibrate.set_defaults(command=_calibrate)

    coordinator = commands.add_parser("coordinator", help="the pool's control plane")
    _takes_config(coordinator)
    _is_process(coordinator)
    coordinator.add_argument("--run", default="", help="name of the run (default: the config's name)")
    coordinator.add_argument("--port", type=int, help="overrides coordinator.port")
    coordinator.set_defaults(command=_coordinator)

    invite = commands.add_parser("invite", help="make an invite for one node")
    invite.add_argument("dir", type=Path, help="the coordinator's folder")
    invite.add_argument("--role", required=True, choices=list(ROLES))
    invite.add_argument("--name", required=True, help="what the node is called in this run")
    invite.add_argument("--url", help="how the node reaches the coordinator (default: where it listens)")
    invite.add_argument("--days", type=float, default=7.0, help="until the invite expires")
    invite.set_defaults(command=_invite)

    for role in ROLES:
        node = commands.add_parser(role, help=ROLES[role])
        alone = role in ("origin", "relay")
        node.add_argument("--join", required=not alone, help="an invite, or a file that holds one")
        _is_process(node, required=not alone)
        if role == "origin":
            node.add_argument("--watch", type=Path, help="with --join: the learner's folder of versions")
            standalone.origin_arguments(node)
        if role == "relay":
            standalone.relay_arguments(node)
        node.set_defaults(command=_node)

    fetch = commands.add_parser("fetch", help="bring published versions from relays to a folder")
    standalone.fetch_arguments(fetch)
    fetch.set_defaults(command=_fetch)
    return parser


ROLES = {
    "learner": "trains on accepted rollouts and publishes policy versions",
    "origin": "cuts published versions into shards and serves them",
    "relay": "mirrors the origin for workers",
    "worker": "generates rollouts",
    "validator": "checks submissions",
    "evaluator": "measures held-out accuracy",
}


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a TOML file, see configs/")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        dest="overlays",
        help="more TOML, laid over it",
    )


def _is_process(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("--dir", type=Path, required=required, help="this node's own folder: key, cache, state")
    parser.add_argument("--threads", type=int, default=0, help="cores to compute on (default: all)")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)  # ends when this process is gone


def _run(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    if arguments.dry_run:
        sys.stdout.write(config_module.dumps(config))
        return DONE
    from shoal.swarm import Swarm

    name = arguments.config.stem
    out = arguments.out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Swarm(config, name, out).run()


def _prepare(arguments: argparse.Namespace) -> int:
    from shoal import process
    from shoal.prepare import prepare

    process.follow(arguments.parent)
    sys.stdout.write(json.dumps(prepare(_config(arguments))) + "\n")
    return DONE


def _sft(arguments: argparse.Namespace) -> int:
    from shoal.learner.sft import train_tiny

    logging.basicConfig(level=logging.INFO, format="%(asctime)s sft: %(message)s", datefmt="%H:%M:%S")
    sys.stdout.write(f"{train_tiny()}\n")
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
    from shoal.calibrate import calibrate

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    calibrate(_config(arguments), arguments.out, arguments.submissions, arguments.weights, say)
    return DONE


def _coordinator(arguments: argparse.Namespace) -> int:
    stop = _begin("coordinator", arguments)
    from shoal.pool.service import serve_forever

    config = _config(arguments)
    port = config.coordinator.port if arguments.port is None else arguments.port
    serve_forever(config, arguments.run or arguments.config.stem, arguments.dir, port, stop)
    return DONE


def _invite(arguments: argparse.Namespace) -> int:
    from shoal.pool.service import invite_from

    invite = invite_from(arguments.dir, arguments.role, arguments.name, arguments.url, arguments.days)
    sys.stdout.write(invite.encode() + "\n")
    return DONE


def _node(arguments: argparse.Namespace) -> int:
    if not arguments.join:
        return _alone(arguments)
    needed = ["dir", "watch"] if arguments.command_name == "origin" else ["dir"]
    _needs(arguments, needed, "--join")
    stop = _begin(arguments.command_name, arguments)
    from shoal.roles import RUN

    ended = RUN[arguments.command_name](arguments, stop)
    return EVICTED if ended == "evicted" else DONE


def _alone(arguments: argparse.Namespace) -> int:
    _needs(arguments, ["path"] if arguments.command_name == "origin" else ["upstream", "key"], "no --join")
    stop = _begin(arguments.command_name, arguments)
    run = standalone.run_origin if arguments.command_name == "origin" else standalone.run_relay
    run(arguments, stop)
    return DONE


def _fetch(arguments: argparse.Namespace) -> int:
    standalone.run_fetch(arguments)
    return DONE


def _needs(arguments: argparse.Namespace, names: list[str], given: str) -> None:
    if missing := [name for name in names if not getattr(arguments, name)]:
        raise ConfigError(f"with {given}, {arguments.command_name} also needs {' and '.join(missing)}")


def _config(arguments: argparse.Namespace) -> Config:
    seed = getattr(arguments, "seed", None)
    overrides = arguments.overrides + ([] if seed is None else [f"run.seed={seed}"])
    return config_module.load(arguments.config, overrides, arguments.overlays)


def _begin(name: str, arguments: Any) -> threading.Event:
    from shoal import process

    os.umask(0o077)
    return process.begin(name, threads=getattr(arguments, "threads", 0), parent=getattr(arguments, "parent", 0))


def _status_of(error: Exception) -> int | None:
    """The exit status of an error that a message explains; None for one that needs its traceback."""
    from shoal.errors import explained

    if isinstance(error, ConfigError):
        return USAGE
    return FAILED if explained(error) else None
