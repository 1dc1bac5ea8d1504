"""`shoal filter CONFIG --out DIR`: measures pass rates of training tasks, and writes which ones are worth training on.

A repeated command continues where the last one stopped.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import (
    Commands,
    StoppedError,
    UsageError,
    add_command,
    read_config,
    say,
    takes_config,
    takes_threads,
    whole,
)

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 40  # cells of the longest bar


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    filter_ = add_command(
        commands, "filter", "measure pass rates of tasks and keep those in a band", "quickstart --out runs/rates"
    )
    takes_config(filter_)
    filter_.add_argument("--out", type=Path, required=True, help="folder of the results; an existing one is resumed")
    filter_.add_argument("--k", type=whole(1, 1024), default=8, help="completions per task (default: 8)")
    filter_.add_argument(
        "--band",
        default="0.125:0.5",
        metavar="LOW:HIGH",
        help="pass rates to keep, both ends included (default: 0.125:0.5, INTELLECT-2's)",
    )
    filter_.add_argument("--n", type=whole(1, 10**9), help="only the first N training tasks (default: all)")
    filter_.add_argument(
        "--batch", type=whole(1, 10**6), default=128, help="completions computed at once (default: 128)"
    )
    takes_threads(filter_)


def run_filter(arguments: argparse.Namespace) -> None:
    """Print a table of pass rates and the path of the manifest. Raises FilterError, StoppedError."""
    from shoal.evals.filter import MANIFEST, Band, PassRates, histogram, write_filter

    config = read_config(arguments)
    try:
        band = Band.parse(arguments.band)
    except ValueError as error:
        raise UsageError(f"--band: {error}") from error
    from shoal.cli.launch import process

    stop = process.begin("filter", threads=arguments.threads)
    from shoal.cli.launch.prepare import model_folder
    from shoal.engine.torch_engine import TorchEngine
    from shoal.model import dtype
    from shoal.watch.terminal.live import Terminal
    from shoal.watch.terminal.progress import Progress

    console = Terminal(stderr=True)
    folder = model_folder(config.model.name)
    rates = PassRates(config, folder, arguments.out, arguments.k, arguments.n, rows=arguments.batch)
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    with Progress(console, "tasks", rates.total) as progress:
        results = rates.measure(TorchEngine(picked, config.model.device), stop, progress)
    if results is None:
        raise StoppedError(
            f"stopped; to continue, repeat the command: the results so far are in {shlex.quote(str(arguments.out))}"
        )
    kept = write_filter(arguments.out, results, band, rates.settings)
    Terminal().print(_table(histogram(results)))
    say(
        f"kept {len(kept)} of {len(results)} tasks with a pass rate from {float(band.low):g} to {float(band.high):g}\n"
        f'{arguments.out / MANIFEST}\nto train on them: keep = "{arguments.out / MANIFEST}" in [[tasks.sources]]'
    )


def _table(found: Mapping[str, int]) -> Table:
    """Tasks by pass rate."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("pass rate", "tasks", "", style="dim")
    for label, count in found.items():
        table.add_row(label, str(count), "█" * -(-count * WIDTH // max(found.values())) if count else "")
    return table
