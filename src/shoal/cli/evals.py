"""`shoal eval SUITE,...`: public benchmarks with models on this machine or behind an OpenAI-compatible URL.

The table goes to standard output, progress to standard error, everything else into a folder. The same command with the same
--out continues an evaluation that was stopped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, UsageError, add_command, real, say, takes_threads, whole

if TYPE_CHECKING:
    from shoal.evals.evaluate import Contestant, Entry

MAX_K = 10_000


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands, "eval", "measure models on public benchmarks", "gsm8k --model runs/quickstart --n 100"
    )
    parser.add_argument("suites", nargs="?", default="", metavar="SUITE[,SUITE...]", help="see --list")
    parser.add_argument("--list", action="store_true", help="list the suites with their sources and defaults")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        dest="models",
        metavar="MODEL",
        help="a model's name, its folder, or the folder of a finished run; more than one are compared with the first",
    )
    parser.add_argument("--url", help="an OpenAI-compatible server, up to and with /v1")
    parser.add_argument(
        "--served-name", action="append", default=[], dest="served", metavar="NAME", help="with --url: its model"
    )
    parser.add_argument("--path", type=Path, help="the suite's rows: a file or a folder (default: from the hub)")
    parser.add_argument("--n", type=whole(1, 10**9), default=0, help="evaluate a fixed random part of n tasks")
    parser.add_argument("--k", type=whole(1, MAX_K), help="completions per task (default: the suite's)")
    parser.add_argument("--temperature", type=real(0, 10), help="0: greedy (default: the suite's)")
    parser.add_argument("--max-tokens", type=whole(1, 10**7), help="longest completion (default: the suite's)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help="of the sampling (default: 0)")
    parser.add_argument("--out", type=Path, help="folder of completions and results; an existing one is continued")
    parser.add_argument("--batch", type=whole(1, 10**6), default=32, help="completions computed at once (default: 32)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="to compute in")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--concurrency", type=whole(1, 10_000), default=8, help="with --url: requests at once")
    parser.add_argument(
        "--deadline", type=real(0.001, 1e6), default=600.0, metavar="S", help="with --url: seconds for one completion"
    )
    parser.add_argument(
        "--key-variable",
        default="SHOAL_API_KEY",
        metavar="NAME",
        help="with --url: environment variable that holds the API key (default: SHOAL_API_KEY)",
    )
    takes_threads(parser)


def run_eval(arguments: argparse.Namespace) -> None:
    from shoal.evals.suites import TABLE

    if arguments.list:
        say("\n".join(f"{s.name:14} k {s.k:2}, T {s.temperature:g}  {s.hub}: {s.about}" for s in TABLE))
        return
    _check(arguments)
    entries = _entries(arguments)
    out: Path = arguments.out or Path("runs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
    from shoal.evals.evaluate import CONFIG, RESULTS, evaluate, recorded
    from shoal.evals.report import PICTURE, draw, table, write_results
    from shoal.model.dtype import compute_on
    from shoal.watch.terminal.live import Terminal

    compute_on(arguments.threads)
    progress = Terminal(stderr=True)
    progress.print(
        f"writing to {out}; to continue after a stop, repeat the command with --out {out}", soft_wrap=True, markup=False
    )
    contestants = [*_local(arguments, recorded(out / CONFIG).get("models", {})), *_served(arguments)]
    labels = [contestant.label for contestant in contestants]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UsageError(f"two models are called {twice}; give different ones")
    results, differences = evaluate(contestants, entries, out, progress, seed=arguments.seed)
    facts = {"command": shlex.join(["shoal", *sys.argv[1:]]), "config": recorded(out / CONFIG)}
    write_results(out / RESULTS, results, differences, facts)
    draw(results, out / PICTURE)
    console = Terminal()
    console.print(table(results, differences))
    console.print(f"written: {out / RESULTS}, {out / PICTURE}", soft_wrap=True, markup=False)


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.suites:
        raise UsageError("name a suite, or --list to see them")
    if bool(arguments.url) != bool(arguments.served):
        raise UsageError("--url and --served-name go together: the server's address and the model it should use")
    if not arguments.models and not arguments.url:
        raise UsageError("name a model: --model MODEL, or --url http://HOST:PORT/v1 --served-name NAME")
    if arguments.path and "," in arguments.suites:
        raise UsageError("--path holds the rows of one suite; evaluate one suite at a time with it")


def _entries(arguments: argparse.Namespace) -> list[Entry]:
    from shoal.evals import suites
    from shoal.evals.evaluate import Entry
    from shoal.evals.samplers import Sampling

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    path = str(arguments.path or "")
    return [
        Entry(
            suite=suite,
            tasks=suites.read(suite, path, arguments.n),
            k=arguments.k or suite.k,
            sampling=Sampling(
                given(arguments.temperature, suite.temperature), arguments.max_tokens or suite.max_tokens
            ),
            path=path,
        )
        for suite in suites.find(arguments.suites)
    ]


def _local(arguments: argparse.Namespace, recorded: dict[str, dict[str, str]]) -> list[Contestant]:
    """Models on this machine. One that the folder knows keeps the dtype that was picked for it then."""
    if not arguments.models:
        return []
    from shoal.evals.local import folder_of, label_of, local
    from shoal.model import dtype

    found = []
    for name in arguments.models:
        label = label_of(name, arguments.models)
        wanted = arguments.dtype if arguments.dtype != "auto" else recorded.get(label, {}).get("dtype", "auto")
        picked, _ = dtype.pick(wanted, arguments.device)
        found.append(local(label, folder_of(name), picked, arguments.device, arguments.batch))
    return found


def _served(arguments: argparse.Namespace) -> list[Contestant]:
    from shoal.evals.remote import Address, served

    return [
        served(Address(arguments.url, name, arguments.key_variable, arguments.concurrency, arguments.deadline))
        for name in arguments.served
    ]
