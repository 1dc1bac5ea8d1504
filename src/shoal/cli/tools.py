"""Commands that look at things: `shoal config`, `shoal calibrate`, `shoal plot`."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal import config as config_module
from shoal.cli.arguments import Commands, UsageError, add_command, read_config, say, takes_config, whole
from shoal.config import Config


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    config_ = add_command(
        commands, "config", "print the resolved values of a config, or explain its fields", "--explain learner.lr"
    )
    takes_config(config_, required=False)
    what = config_.add_mutually_exclusive_group()
    what.add_argument(
        "--explain", nargs="?", const="", metavar="KEY", help="describe every field, those of a section, or one field"
    )
    what.add_argument("--markdown", action="store_true", help="describe every field, as one Markdown page")

    calibrate_ = add_command(
        commands, "calibrate", "measure honest work and write the validator's limits", "quickstart --out calibration"
    )
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

    plot_ = add_command(commands, "plot", "draw the metrics of runs side by side", "runs/one runs/two")
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
