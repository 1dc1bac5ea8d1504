"""`shoal run`: a whole run on this machine. Its heavy modules are imported once the arguments are checked."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from shoal import config as config_module
from shoal.cli.arguments import (
    Commands,
    UsageError,
    add_command,
    read_config,
    run_name,
    takes_config,
    takes_dashboard,
)
from shoal.config import Config


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    run_ = add_command(commands, "run", "run everything on this machine", "quickstart --set run.steps=20")
    takes_config(run_, required=False)
    run_.add_argument("--resume", type=Path, metavar="RUN", help="resume the run in this folder (instead of a config)")
    run_.add_argument("--seed", type=int, help="overrides run.seed")
    run_.add_argument("--out", type=Path, metavar="RUN", help="folder of this run (default: runs/CONFIG-TIME)")
    takes_dashboard(run_)


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.resume) == bool(arguments.config):
        raise UsageError("name a config, or the folder of a run to resume: shoal run --resume RUN")
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
