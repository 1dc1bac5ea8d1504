"""What `shoal` reads from its command line: each command's arguments, and nothing of what it does.

Invariant: reading arguments imports nothing heavy, so `--help` answers at once. Called by `cli`, which maps a command's
name to what it does; a command with many arguments keeps them in the module that runs it (`shardcast`, `sft`).
"""

import argparse
from pathlib import Path

from shoal.cli import sft, shardcast

ROLES = {
    "learner": "trains on accepted rollouts and publishes policy versions",
    "origin": "cuts published versions into shards and serves them",
    "relay": "mirrors the origin for workers",
    "worker": "generates rollouts",
    "validator": "checks submissions",
    "evaluator": "measures held-out accuracy",
}


def command_line() -> argparse.ArgumentParser:
    """The parser of `shoal`; what it reads names the command as `command_name`."""
    parser = argparse.ArgumentParser(prog="shoal", description="Reinforcement learning on machines nobody must trust.")
    commands = parser.add_subparsers(dest="command_name", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run everything on this machine")
    _takes_config(run, nargs="?")
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in DIR, in place of a config")
    run.add_argument("--seed", type=int, help="overrides run.seed")
    run.add_argument("--out", type=Path, help="folder of this run (default: runs/<config name>-<time>)")
    run.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")

    prepare = commands.add_parser("prepare", help="fetch the model, measure the dtype; prints both as JSON")
    _takes_config(prepare)
    _shares_cores(prepare)

    finetuning = commands.add_parser("sft", help="supervised fine-tuning on conversations")
    sft.sft_arguments(finetuning)

    verify = commands.add_parser("verify", help="check one submission by hand")
    verify.add_argument("file", type=Path, help="a submission, as Parquet")
    verify.add_argument("--run", type=Path, help="folder of a run that `shoal run` made: its config and weights")
    verify.add_argument("--config", type=Path, help="instead of --run: the resolved config")
    verify.add_argument("--weights", type=Path, help="folder of the policy version the file names")

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

    plot = commands.add_parser("plot", help="draw the metrics of runs side by side")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder; it may be going on")
    plot.add_argument("--out", type=Path, default=Path("plot.png"), help="the picture (default: plot.png)")
    plot.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="default: those worth watching")

    coordinator = commands.add_parser("coordinator", help="the pool's control plane")
    _takes_config(coordinator)
    _is_process(coordinator)
    coordinator.add_argument("--run", default="", help="name of the run (default: the config's name)")
    coordinator.add_argument("--port", type=int, help="overrides coordinator.port")
    coordinator.add_argument("--record", type=Path, metavar="DIR", help="folder of the metrics (default: --dir)")

    invite = commands.add_parser("invite", help="make an invite for one node")
    invite.add_argument("dir", type=Path, help="the coordinator's folder")
    invite.add_argument("--role", required=True, choices=list(ROLES))
    invite.add_argument("--name", required=True, help="what the node is called in this run")
    invite.add_argument("--url", help="how the node reaches the coordinator (default: where it listens)")
    invite.add_argument("--days", type=float, default=7.0, help="until the invite expires")

    for role in ROLES:
        node = commands.add_parser(role, help=ROLES[role])
        alone = role in ("origin", "relay")
        node.add_argument("--join", required=not alone, help="an invite, or a file that holds one")
        _is_process(node, required=not alone)
        if role == "origin":
            node.add_argument("--watch", type=Path, help="with --join: the learner's folder of versions")
            shardcast.origin_arguments(node)
        if role == "relay":
            shardcast.relay_arguments(node)

    fetch = commands.add_parser("fetch", help="bring published versions from relays to a folder")
    shardcast.fetch_arguments(fetch)
    return parser


def _takes_config(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    parser.add_argument("config", type=Path, nargs=nargs, help="a TOML file, see configs/")
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
    _shares_cores(parser)


def _shares_cores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=0, help="cores to compute on (default: all)")
