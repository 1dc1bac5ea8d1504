"""Commands for a whole run on this machine: `shoal run`, `shoal prepare`, `shoal clean`.

Each imports the heavy modules it needs once its arguments are checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from shoal import config as config_module
from shoal.cli.arguments import (
    USAGE,
    Commands,
    UsageError,
    read_config,
    run_name,
    say,
    takes_config,
    takes_dashboard,
    takes_threads,
)
from shoal.config import Config


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    run_ = commands.add_parser("run", help="run everything on this machine")
    takes_config(run_, required=False)
    run_.add_argument("--resume", type=Path, metavar="DIR", help="resume the run in DIR (instead of a config)")
    run_.add_argument("--seed", type=int, help="overrides run.seed")
    run_.add_argument("--out", type=Path, help="folder of this run (default: runs/CONFIG-TIME)")
    takes_dashboard(run_)
    run_.add_argument("--dry-run", action="store_true", help="check the config on this machine, say so, and stop")
    run_.add_argument("--verbose", action="store_true", help="with --dry-run: print the whole resolved config too")

    prepare_ = commands.add_parser(
        "prepare", help="build the task set, fetch the model and measure the dtype; prints all as JSON"
    )
    takes_config(prepare_)
    takes_threads(prepare_)
    prepare_.add_argument("--tasks", type=Path, metavar="DIR", help="keep the task set there (default: nowhere)")

    clean_ = commands.add_parser("clean", help="free the disk space that a stopped run no longer needs")
    clean_.add_argument("dir", type=Path, metavar="DIR", help="the run's folder")


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.resume) == bool(arguments.config):
        raise UsageError("name a config, or the folder of a run to resume: shoal run --resume DIR")
    if arguments.resume and arguments.out:
        raise UsageError(f"a resumed run stays in its folder {arguments.resume}; leave --out out")
    if arguments.resume:
        arguments.config = arguments.resume / "config.toml"
        if not arguments.config.is_file():
            raise UsageError(f"{arguments.resume} is not the folder of a run: no config.toml there")
    if arguments.seed is not None:
        arguments.overrides.append(f"run.seed={arguments.seed}")
    config = read_config(arguments)
    if arguments.resume:
        _check_model(config, arguments.resume)
    if arguments.verbose and not arguments.dry_run:
        raise UsageError("--verbose goes with --dry-run")
    if arguments.dry_run:
        return _dry_run(config, whole=arguments.verbose)
    from shoal.cli.launch.folder import stopped_run
    from shoal.cli.launch.swarm import Swarm

    if arguments.resume:
        name, address = stopped_run(arguments.resume)
        return Swarm(config, name, arguments.resume, address, dashboard=arguments.dashboard).run()
    stem = arguments.config.stem
    name = run_name(f"{stem}-{config.run.seed}", "rename the config file, after which the run is called")
    out = arguments.out or Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Swarm(config, name, out, dashboard=arguments.dashboard).run()


def _check_model(config: Config, folder: Path) -> None:
    """Raise UsageError if the run in this folder trains another model: its checkpoints fit no other."""
    held = config_module.load(folder / "config.toml").model.name
    if config.model.name != held:
        raise UsageError(f"the run in {folder} trains {held}, not {config.model.name}: start a new run for that model")


def _dry_run(config: Config, *, whole: bool) -> int:
    from shoal.cli.preflight.problems import problems

    if whole:
        say(config_module.dumps(config).rstrip("\n"))
    notes: list[str] = []
    found = problems(config, notes)
    for line in [*(f"tasks: {note}" for note in notes), *(f"shoal run: {one}" for one in found)]:
        say(line, sys.stderr)
    if found:
        return USAGE
    say("# nothing stands in the way of this run here" if whole else "nothing stands in the way of this run here")
    return 0


def prepare(arguments: argparse.Namespace) -> None:
    config = read_config(arguments)
    from shoal.cli.launch.prepare import prepare as prepare_run
    from shoal.model.dtype import compute_on

    compute_on(arguments.threads)
    say(json.dumps(prepare_run(config, arguments.tasks)))


def clean(arguments: argparse.Namespace) -> None:
    from shoal.cli.launch.clean import clean_run

    say(f"freed {clean_run(arguments.dir) / 1e9:.2f} GB in {arguments.dir}")
