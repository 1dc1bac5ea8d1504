"""What programs that a worker made up cost a run: seconds a step beside such workers, against beside workers that left.

    python -m benchmarks.trust.made_up_programs [--seconds 40] [--liars 2] [--out benchmarks/results/made_up_programs.json]

Two runs of a small model, whose rewards run each completion as a program, with `validator.check_floor` at 0.05. In both,
the liars make HONEST submissions each, so that half of theirs are prefilled in part only. In one run they then leave. In the
other they put programs that sleep, under well-formed proofs, in place of 4 of the 32 rollouts of each further submission,
until they are slashed. A figure is the length of a run's next --seconds divided by the number of steps that ended in them.
The goal is a ratio below 1.2. It runs on any version of Shoal that has `run_worker`, which is how 98775a2 was measured.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.machine import RESULTS, ROOT, command_line, describe
from shoal.cli.launch import process
from shoal.cli.roles import run_worker
from shoal.coordinator.operating import create_invite
from shoal.coordinator.trust import TRUST_AFTER
from shoal.engine.protocol import Completion
from shoal.protocol.invite import read_invite
from shoal.store.rollouts import Rollout
from shoal.tasks.derive import GroupPlan
from shoal.worker.produce import Producer

PATH = RESULTS / "made_up_programs.json"
TINY = ROOT / "configs" / "tiny.toml"
START_S = 240.0
HONEST, MADE_UP = TRUST_AFTER + 1, 4
SLEEPS = "import time;time.sleep(99)"
TESTS = {"kind": "stdin", "cases": [{"input": "1", "output": "1"}]}
SETTINGS = {
    "run.steps": 100_000,
    "sampling.max_tokens": 32,
    "coordinator.online_filter": "false",
    "coordinator.prompts_per_step": 8,
    "workers.groups_per_submission": 2,
    "workers.count": 1,
    "validator.check_floor": 0.05,
    "tasks.heldout": 64,
    "evaluator.n": 16,
}


class Liar(Producer):
    """Honest at first. Then it leaves, or makes programs up."""

    stop: threading.Event
    begun: Path  # made when it begins to lie, or leaves
    lies: bool
    made = 0

    def rollouts(self, plans: Sequence[GroupPlan], groups: Sequence[Sequence[Completion]]) -> list[Rollout]:
        rows = super().rollouts(plans, groups)
        self.made += 1
        if self.made <= HONEST:
            return rows
        self.begun.touch()
        if not self.lies:
            self.stop.set()
            return rows
        end = self.tokenizer.eos_token_id
        tokens = [*self.tokenizer.encode(SLEEPS, add_special_tokens=False), end]
        change = {"tokens": tokens, "logprobs": [-1.0] * len(tokens)}
        return [replace(row, **change, proofs=row.proofs[:1]) if n < MADE_UP else row for n, row in enumerate(rows)]


def liar(invite: str, folder: Path, *, lies: bool) -> int:
    stop = process.begin("worker that makes programs up", threads=1)
    kind = type("Liar", (Liar,), {"stop": stop, "begun": folder / "begun", "lies": lies})
    run_worker(read_invite(invite), folder, 1, stop, kind)
    return 0


def times(metrics: Path) -> list[float]:
    """When each step ended, Unix seconds."""
    if not metrics.exists():
        return []
    return [json.loads(line)["time_s"] for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait(what: str, run: "subprocess.Popen[bytes]", done: Any) -> None:
    deadline_s = time.monotonic() + START_S
    while not done():
        if run.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"no {what} within {START_S:g} s, or the run ended ({run.returncode})")
        time.sleep(0.1)


def measured(arguments: argparse.Namespace, *, lies: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        out, folder = Path(made) / "run", Path(made)
        rows = [{"question": f"{n}+{n}", "tests": json.dumps(TESTS)} for n in range(10, 700)]
        (folder / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = TINY.read_text().replace(
            'generator = "arithmetic"\noptions = { operand_min = 10, operand_max = 99 }',
            f'path = "{folder}/programs.jsonl"\nreward = "code"\nfields = {{ question = "question", tests = "tests" }}',
        )
        (folder / "config.toml").write_text(config)
        settings = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "shoal", "run", str(folder / "config.toml"), "--out", str(out), *settings]
        with (folder / "log").open("wb") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            wait("step", run, lambda: times(out / "metrics.jsonl"))
            homes = [folder / f"liar-{number}" for number in range(arguments.liars)]
            for home in homes:
                home.mkdir()
                invite = create_invite(out / "coordinator", "worker", home.name, None, 1.0)
                (home / "invite").write_text(invite.encode())
                command = [sys.executable, "-m", __spec__.name, "--liar", str(home / "invite")]
                command += ["--lies"] if lies else []
                with (home / "log").open("wb") as log:
                    workers.append(subprocess.Popen(command, stdout=log, stderr=log))
            begun = all if not lies else any  # the window begins with the first lie, or when all have left
            wait("lie", run, lambda: begun((home / "worker" / "begun").exists() for home in homes))
            began_s = time.time()
            time.sleep(arguments.seconds)
            steps = sum(began_s <= ended_s < began_s + arguments.seconds for ended_s in times(out / "metrics.jsonl"))
        except RuntimeError:
            for log in folder.glob("**/log"):
                sys.stderr.write(f"{log}\n{log.read_text()[-2000:]}\n")
            raise
        finally:
            for one in [*workers, run]:
                one.send_signal(signal.SIGINT)
            for one in [*workers, run]:
                one.wait(120)
    return {"lies": lies, "seconds": arguments.seconds, "steps": steps, "step_s": arguments.seconds / max(steps, 1)}


def main(arguments: argparse.Namespace) -> int:
    if arguments.liar:
        return liar(str(arguments.liar), arguments.liar.parent / "worker", lies=arguments.lies)
    quiet, attacked = measured(arguments, lies=False), measured(arguments, lies=True)
    told: dict[str, Any] = {
        "command": command_line(),
        "machine": describe() | {"load": os.getloadavg()},
        "ratio": attacked["step_s"] / quiet["step_s"],
        "runs": [quiet, attacked],
    }
    arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    sys.stdout.write(f"{json.dumps(told['runs'])}\na step takes {told['ratio']:.2f} times as long\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What programs that a worker made up cost a run.")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the run that are measured")
    parser.add_argument("--liars", type=int, default=2)
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--liar", type=Path, help=argparse.SUPPRESS)  # the file with its invite: be one
    parser.add_argument("--lies", action="store_true", help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
