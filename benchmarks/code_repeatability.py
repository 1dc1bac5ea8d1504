"""Do two machines give a program the same score? Programs below, near and above the CPU limit, and HumanEval's solutions.

    python benchmarks/code_repeatability.py HumanEval.jsonl.gz

Every program is graded several times in three conditions that stand for machines: as it is; with twice as many busy
processes as cores; and with two thirds of the limit, as on a machine 1.5 times slower. A program of share s needs s of the
limit where nothing else runs, by a calibration at the start. Every grade is paired, as a worker's, with every other one,
as a validator's. A pair that differs is a lie in the validator's eyes unless its own grade says that it is not repeatable.

Writes benchmarks/results/code_repeatability.json: for each program the passes and the grades that are not repeatable per
condition, the pairs that differ, and how many of those would be taken for a lie. That number must be 0.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from humaneval import read, task
from machine import describe

from shoal.sandbox import Program, ProgramLimits, Sandbox
from shoal.tasks import Grade, Task
from shoal.tasks.rewards.code import Code

RESULTS = Path(__file__).parent / "results" / "code_repeatability.json"
SHARES = (0.1, 0.3, 0.4, 0.45, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.2)
LIMITS = ProgramLimits(cpu_s=1.0, wall_s=10.0)
LOOP = "def f(n):\n    x = 0\n    for i in range(n):\n        x = (x + i) % 1000003\n    return 1\n"
SLOWER = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description="Do two machines give a program the same score?")
    parser.add_argument("data", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    rate = calibrate()
    programs: dict[str, tuple[Task, str]] = {
        f"share {share}": (
            Task("t", "", "", tests=functional(int(rate * LIMITS.cpu_s * share))),
            LOOP,
        )
        for share in SHARES
    }
    rows = read(arguments.data)
    programs |= {row["task_id"]: (task(row), row["canonical_solution"]) for row in rows}
    grades: dict[str, dict[str, list[Grade]]] = {name: {} for name in programs}
    slower = replace(LIMITS, cpu_s=LIMITS.cpu_s / SLOWER, wall_s=LIMITS.wall_s / SLOWER)
    for condition, limits, busy in (
        ("as it is", LIMITS, 0),
        ("busy", LIMITS, 2 * len(os.sched_getaffinity(0))),
        (f"{SLOWER} times slower", slower, 0),
    ):
        code = Code(limits, size=1)
        with busy_processes(busy):
            for name, (given, source) in programs.items():
                repeats = arguments.repeats if name.startswith("share") else 1
                grades[name][condition] = [code.grade([given], [source])[0] for _ in range(repeats)]
        code.close()
        sys.stderr.write(f"{condition} done\n")
    found = {
        "command": "python benchmarks/code_repeatability.py HumanEval.jsonl.gz",
        "machine": describe(),
        "limits": {"cpu_s": LIMITS.cpu_s, "wall_s": LIMITS.wall_s},
        "load average": [round(value, 1) for value in os.getloadavg()],
        "programs": {name: table(grades[name]) for name in programs if name.startswith("share")},
        "HumanEval": total([table(grades[row["task_id"]]) for row in rows]),
    }
    found["all"] = total([table(each) for each in grades.values()])
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    sys.stdout.write(json.dumps(found["all"], indent=2) + "\n")


def functional(argument: int) -> str:
    return json.dumps({"kind": "functional", "entry": "f", "cases": [{"args": [argument], "output": 1}]})


def calibrate() -> float:
    """Turns of the loop in a second of CPU: the best of several, each in the sandbox."""
    turns = 3_000_000
    with Sandbox(limits=ProgramLimits(cpu_s=60.0, wall_s=300.0)) as box:
        start = min(box.run(Program(LOOP)).cpu_s for _ in range(5))
        return max(turns / (box.run(Program(f"{LOOP}f({turns})")).cpu_s - start) for _ in range(7))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.5 if count else 0.0)
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def table(grades: dict[str, list[Grade]]) -> dict[str, Any]:
    pairs = [
        (worker, validator)
        for one, other in permutations(grades, 2)
        for worker in grades[one]
        for validator in grades[other]
    ]
    pairs += [pair for each in grades.values() for pair in permutations(each, 2)]
    differ = [validator for worker, validator in pairs if worker.score != validator.score]
    return {
        "passes": {name: f"{sum(one.score == 1.0 for one in each)} of {len(each)}" for name, each in grades.items()},
        "not repeatable": {name: sum(not one.repeatable for one in each) for name, each in grades.items()},
        "pairs": len(pairs),
        "pairs that differ": len(differ),
        "taken for a lie": sum(one.repeatable for one in differ),
    }


def total(tables: list[dict[str, Any]]) -> dict[str, int]:
    found = {key: sum(each[key] for each in tables) for key in ("pairs", "pairs that differ", "taken for a lie")}
    return found | {"not repeatable": sum(sum(each["not repeatable"].values()) for each in tables)}


if __name__ == "__main__":
    main()
