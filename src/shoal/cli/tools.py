"""Commands that look at things: `shoal config`, `shoal verify`, `shoal calibrate`, `shoal plot`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal import config as config_module
from shoal.cli.arguments import Commands, UsageError, read_config, say, takes_config, whole
from shoal.config import Config


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    config_ = commands.add_parser("config", help="print the resolved values of a config, or explain its fields")
    takes_config(config_, required=False)
    what = config_.add_mutually_exclusive_group()
    what.add_argument(
        "--explain", nargs="?", const="", metavar="KEY", help="describe every field, those of a section, or one field"
    )
    what.add_argument("--markdown", action="store_true", help="describe every field, as one Markdown page")

    verify_ = commands.add_parser("verify", help="check one submission by hand")
    verify_.add_argument("file", type=Path, help="a submission, as Parquet")
    verify_.add_argument("--run", type=Path, help="folder of a run that `shoal run` made: its config and weights")
    verify_.add_argument("--config", type=Path, help="instead of --run: the resolved config")
    verify_.add_argument("--weights", type=Path, help="folder of the policy version that the file names")

    calibrate_ = commands.add_parser("calibrate", help="measure honest work and write the validator's limits")
    takes_config(calibrate_)
    calibrate_.add_argument(
        "--out", type=Path, default=Path("calibration"), help="folder of limits.toml and measured.json"
    )
    calibrate_.add_argument("--submissions", type=whole(1, 100_000), default=8, help="per condition (default: 8)")
    calibrate_.add_argument(
        "--weights",
        type=Path,
        nargs="+",
        default=[],
        help="policy versions to measure on (default: the config's model)",
    )

    plot_ = commands.add_parser("plot", help="draw the metrics of runs side by side")
    plot_.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a finished or running run")
    plot_.add_argument("--out", type=Path, default=Path("plot.png"), help="the picture (default: plot.png)")
    plot_.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="(default: the essential ones)")


def config(arguments: argparse.Namespace) -> None:
    from shoal.config import explain

    if arguments.config and (arguments.markdown or arguments.explain is not None):
        raise UsageError("--explain and --markdown describe defaults; leave the config out")
    if arguments.markdown:
        say(explain.markdown().rstrip("\n"))
    elif arguments.explain is not None:
        say(explain.text(explain.fields(arguments.explain)))
    else:
        say(config_module.dumps(read_config(arguments) if arguments.config else Config()).rstrip("\n"))


def verify(arguments: argparse.Namespace) -> int:
    path = arguments.config or (arguments.run / "config.toml" if arguments.run else None)
    if path is None:
        raise UsageError("name the run the file belongs to: --run DIR, or --config CONFIG and --weights FOLDER")
    settings = config_module.load(path)
    data = arguments.file.read_bytes()
    from shoal.model import dtype
    from shoal.store.rollouts import RolloutFileError
    from shoal.validator import by_hand

    try:
        header = by_hand.read_header(data, settings)
        weights = arguments.weights or _weights(arguments.run or path.parent, header.policy_version)
        picked, _ = dtype.pick(settings.model.dtype, settings.model.device)
        drawn_by = _curriculum(arguments.run, header.step) if settings.tasks.curriculum == "pass_rate" else {}
        status, lines = by_hand.verify(data, header, settings, weights, picked, **drawn_by)
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
        raise UsageError(str(error)) from error


def _curriculum(run: Path | None, step: int) -> dict[str, Any]:
    """The pages that a step's tasks were drawn by, from the coordinator's folder in a run's folder."""
    from shoal.coordinator.curriculum import open_pages, read_page

    if run is None:
        raise UsageError("this run draws tasks by their pass rates, which are in its folder: name it with --run")
    pages = open_pages(run / "coordinator")
    return {"curriculum": pages.digest(step), "page": lambda digest: read_page(pages, digest)}


def calibrate(arguments: argparse.Namespace) -> None:
    settings = read_config(arguments)
    from shoal.cli.calibrate import calibrate as measure
    from shoal.cli.preflight.problems import check_length

    check_length(settings)
    measure(settings, arguments.out, arguments.submissions, arguments.weights, say)


def plot(arguments: argparse.Namespace) -> None:
    from shoal.watch.plot import plot as draw

    drawn = draw(arguments.runs, arguments.metrics, arguments.out)
    say(f"{arguments.out}: {', '.join(drawn)}")
