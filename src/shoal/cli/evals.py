"""Measure models and tasks: `shoal eval`, `shoal filter`.

`shoal eval SUITE,...` runs public benchmarks with models on this machine or behind an OpenAI-compatible URL. The table goes
to standard output, progress to standard error, everything else into a folder. `shoal filter` measures pass rates of training
tasks, and selects the tasks worth training on. To continue after a stop, repeat the command.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, add_command, add_config, add_threads, read_config, real, say, whole
from shoal.errors import ShoalError, UserError

if TYPE_CHECKING:
    from shoal.evals.evaluate import Contestant

MAX_K = 10_000


def add_commands(commands: Commands) -> None:
    what = "measure models on public benchmarks"
    parser = add_command(commands, "eval", run_eval, what, "gsm8k --model runs/quickstart --n 100")
    add = parser.add_argument
    suites = "suites that --list shows, or tasks of lm_eval"
    add("suites", nargs="?", default="", metavar="SUITE[,SUITE...]", help=suites)
    add("--list", action="store_true", help="list the suites with their defaults")
    models = "a model's name or folder, or a run's folder; further models are compared with the first"
    add("--model", action="append", default=[], dest="models", metavar="MODEL", help=models)
    add("--url", help="URL of an OpenAI-compatible server, with /v1; OPENAI_API_KEY holds its key")
    served = "with --url: the model's name on that server"
    add("--served-name", action="append", default=[], dest="served", metavar="NAME", help=served)
    add("--path", help="file or folder with a code suite's rows (default: fetch them from the hub)")
    tasks = "tasks per suite: for lm_eval the first N, for a code suite N chosen by hash (default: all)"
    add("--n", type=whole(1, 10**9), default=0, help=tasks)
    add("--k", type=whole(1, MAX_K), help="completions per task (default: the suite's)")
    add("--temperature", type=real(0, 10), help="0: greedy (default: the suite's)")
    add("--max-tokens", type=whole(1, 10**7), help="maximum length of a completion (default: the suite's)")
    add("--out", type=Path, help="folder for completions and results; an unfinished evaluation in it is continued")
    add_threads(parser)

    what = "measure the pass rates of tasks, and keep the tasks in a band"
    parser = add_command(commands, "filter", run_filter, what, "quickstart --out runs/rates")
    add_config(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results; an unfinished measurement in it is continued")
    add("--k", type=whole(1, 1024), default=8, help="completions per task (default: 8)")
    band = "pass rates to keep, both ends included (default: 0.125:0.5, as in INTELLECT-2)"
    add("--band", default="0.125:0.5", metavar="LOW:HIGH", help=band)
    add("--n", type=whole(1, 10**9), help="only the first N training tasks (default: all)")
    add_threads(parser)


def run_eval(arguments: argparse.Namespace) -> None:
    from shoal.evals.harness import check_installed
    from shoal.evals.suites import TABLE, find

    if arguments.list:
        say("\n".join(f"{s.name:14} k {s.k:2}, T {s.temperature:g}  {s.task}: {s.about}" for s in TABLE))
        return
    if not arguments.suites:
        raise UserError("name a suite; --list shows them")
    if bool(arguments.url) != bool(arguments.served):
        raise UserError("--url and --served-name go together: the server's address and the model it should use")
    if not arguments.models and not arguments.url:
        raise UserError("name a model: --model MODEL, or --url http://HOST:PORT/v1 --served-name NAME")
    check_installed()
    options = {"k": arguments.k, "temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    changed = {name: value for name, value in options.items() if value is not None}
    suites = [replace(suite, **changed) for suite in find(arguments.suites)]
    if arguments.path is not None:
        if len(suites) > 1 or not suites[0].prompt:
            raise UserError("--path needs exactly one suite: HumanEval, MBPP or LiveCodeBench")
        suites = [replace(suites[0], path=arguments.path)]
    out: Path = arguments.out or Path("runs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
    from shoal.evals.evaluate import RESULTS, evaluate, table, write_results
    from shoal.watch.terminal.live import Terminal

    progress = Terminal(stderr=True)
    progress.print(
        f"writing to {out}; to continue after a stop, repeat the command with --out {out}", soft_wrap=True, markup=False
    )
    contestants = list(_contestants(arguments, out))
    labels = [contestant.label for contestant in contestants]
    if repeated := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"two models are called {repeated}; name different models")
    results, differences = evaluate(contestants, suites, out, progress, n=arguments.n)
    write_results(out / RESULTS, results, differences, shlex.join(["shoal", *sys.argv[1:]]))
    console = Terminal()
    console.print(table(results, differences))
    console.print(f"written: {out / RESULTS}", soft_wrap=True, markup=False)


def _contestants(arguments: argparse.Namespace, out: Path) -> Iterator[Contestant]:
    """Yield the models on this machine (for a run, its newest version), then those behind a URL."""
    from shoal.evals.evaluate import Contestant
    from shoal.evals.harness import Endpoint, serving
    from shoal.serve.versions import digest, label_of, source_of

    for name in arguments.models:
        offers = source_of(name).offers()
        if not offers:
            raise UserError(f"{name} holds no version yet; name a run that has published one")
        label = label_of(name, arguments.models)
        folder = out / "serve" / label.replace("/", "_")
        yield Contestant(
            label, {"digest": digest(offers[0].folder)}, partial(serving, name, offers[0].id, folder, arguments.threads)
        )
    for name in arguments.served:
        served = nullcontext(Endpoint(arguments.url, name))
        yield Contestant(name, {"url": arguments.url}, lambda served=served: served)  # type: ignore[misc]


def run_filter(arguments: argparse.Namespace) -> None:
    """Print a table of pass rates and the path of the manifest. Raise ShoalError."""
    from shoal.evals.filter import MANIFEST, Band, PassRates, histogram, write_filter

    config = read_config(arguments)
    try:
        band = Band.parse(arguments.band)
    except ValueError as error:
        raise UserError(f"--band: {error}") from error
    from shoal.cli.launch import process

    stop = process.begin("filter", threads=arguments.threads)
    from shoal.cli.launch.prepare import model_folder
    from shoal.engine.torch_engine import TorchEngine
    from shoal.model import dtype
    from shoal.watch.terminal.live import Terminal
    from shoal.watch.terminal.progress import CommandProgress

    folder = model_folder(config.model.name)
    rates = PassRates(config, folder, arguments.out, arguments.k, arguments.n)
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    progress = CommandProgress(Terminal(stderr=True), "tasks", rates.total)
    results = rates.measure(TorchEngine(picked, config.model.device), stop, progress)
    if results is None:
        raise ShoalError(
            f"stopped; to continue, repeat the command: the results so far are in {shlex.quote(str(arguments.out))}"
        )
    kept = write_filter(arguments.out, results, band, rates.settings)
    say("\n".join(["pass rate  tasks", *(f"{label:>9}  {count:5}" for label, count in histogram(results).items())]))
    say(
        f"kept {len(kept)} of {len(results)} tasks, with pass rates from {float(band.low):g} to {float(band.high):g}\n"
        f'{arguments.out / MANIFEST}\nto train on them: keep = "{arguments.out / MANIFEST}" in [[tasks.sources]]'
    )
