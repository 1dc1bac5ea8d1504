"""HumanEval through the reward `code`: canonical solutions, mutated ones, and the speed of the warm pool.

    python benchmarks/humaneval.py HumanEval.jsonl.gz

In each tier that works here, all 164 canonical solutions must pass and 164 mutated ones must fail. A mutant changes one
thing of the canonical solution: a comparison, an operator, a constant, a condition, or what a `return` returns. Mutants are
tried in the order of the source, and the first that bare Python finds to fail the data set's own tests is taken, so it is
known to be different. One that does not end within 3 s is not taken.

Speed, all on one core, in turns: the 164 canonical solutions through the pool, where each takes two sandboxed processes (the
model's code, and the tests); and the same programs with their tests in one `python -c` and one `python -I -S -c` each,
without a sandbox. CPU time is that of this process and all it started, so it says more than wall time where others use the
machine.
Writes benchmarks/results/humaneval.json.
"""

import argparse
import ast
import copy
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe
from sandbox_speed import all_cpu_s

from shoal.sandbox import TIERS, ProgramLimits, interpreter, problem
from shoal.tasks import Grade, Task
from shoal.tasks.rewards.code import Code

RESULTS = Path(__file__).parent / "results" / "humaneval.json"
COMPARISONS = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
NEVER_ENDS_S = 3.0
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="HumanEval through the reward `code`")
    parser.add_argument("data", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    rows = read(arguments.data)
    mutants = [mutant(row) for row in rows]
    found: dict[str, Any] = {
        "command": "python benchmarks/humaneval.py HumanEval.jsonl.gz",
        "machine": describe(),
        "interpreter": interpreter(),
        "mutations": {name: sum(kind == name for kind, _ in mutants) for name in sorted({kind for kind, _ in mutants})},
        "tiers": {},
    }
    for tier in TIERS:
        found["tiers"][tier] = {"problem": problem(tier)} if problem(tier) else verdicts(rows, mutants, tier)
        sys.stderr.write(f"{tier}: {found['tiers'][tier]}\n")
    found["load average"] = [round(value, 1) for value in os.getloadavg()]
    found["speed"] = speed(rows, [tier for tier in TIERS if not problem(tier)], arguments.rounds)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    sys.stdout.write(json.dumps(found["speed"], indent=2) + "\n")


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def task(row: dict[str, str]) -> Task:
    tests = {"kind": "asserts", "entry": row["entry_point"], "code": row["test"], "prompt": row["prompt"]}
    return Task(row["task_id"], row["prompt"], "", tests=json.dumps(tests))


def mutants_of(row: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every solution that differs from the canonical one in one place, as (kind, source)."""
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == row["entry_point"])
    places = [n for statement in function.body for n in ast.walk(statement)]
    for number, place in enumerate(places):
        for kind in kinds(place):
            changed = copy.deepcopy(tree)
            target = next(n for n in changed.body if isinstance(n, ast.FunctionDef) and n.name == row["entry_point"])
            change([n for statement in target.body for n in ast.walk(statement)][number], kind)
            yield kind, ast.unparse(ast.fix_missing_locations(changed))


def kinds(place: ast.AST) -> list[str]:
    if isinstance(place, ast.Compare) and type(place.ops[0]) in COMPARISONS:
        return ["comparison"]
    if isinstance(place, ast.BinOp) and type(place.op) in OPERATORS:
        return ["operator"]
    if isinstance(place, ast.BoolOp):
        return ["condition"]
    if isinstance(place, ast.Constant) and isinstance(place.value, int) and not isinstance(place.value, bool):
        return ["constant"]
    return ["return"] if isinstance(place, ast.Return) and place.value is not None else []


def change(place: Any, kind: str) -> None:
    if kind == "comparison":
        place.ops[0] = COMPARISONS[type(place.ops[0])]()
    elif kind == "operator":
        place.op = OPERATORS[type(place.op)]()
    elif kind == "condition":
        place.op = ast.And() if isinstance(place.op, ast.Or) else ast.Or()
    elif kind == "constant":
        place.value += 1
    else:
        place.value = ast.Tuple([place.value, ast.Constant("changed")], ast.Load())


def mutant(row: dict[str, str]) -> tuple[str, str]:
    """The first mutant that the tests tell from the canonical solution."""
    return next((kind, source) for kind, source in mutants_of(row) if bare(source, row) not in (0, None))


def bare(source: str, row: dict[str, str], *flags: str) -> int | None:
    """The exit status of a program and its tests in one unprotected process; None: it does not end."""
    text = f"{source}\n{row['test']}\ncheck({row['entry_point']})\n"
    try:
        return subprocess.run(
            [sys.executable, *flags, "-c", text], timeout=NEVER_ENDS_S, capture_output=True
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def verdicts(rows: list[dict[str, str]], mutants: list[tuple[str, str]], tier: str) -> dict[str, Any]:
    tasks = [task(row) for row in rows]
    whole = [f"```python\n{row['prompt']}{row['canonical_solution']}\n```" for row in rows]
    code = Code(ProgramLimits(), tier)
    try:
        grades = {
            "canonical": code.grade(tasks, [row["canonical_solution"] for row in rows]),
            "canonical, whole and fenced": code.grade(tasks, whole),
            "mutated": code.grade(tasks, [source for _, source in mutants]),
        }
    finally:
        code.close()
    return {name: summary(found) for name, found in grades.items()}


def summary(grades: list[Grade]) -> dict[str, Any]:
    return {
        "passed": sum(grade.score == 1.0 for grade in grades),
        "failed": sum(grade.score == 0.0 for grade in grades),
        "grader errors": sum(grade.outcome == "grader_error" for grade in grades),
        "not repeatable": sum(not grade.repeatable for grade in grades),
    }


def speed(rows: list[dict[str, str]], tiers: list[str], rounds: int) -> dict[str, Any]:
    """Solutions graded a second on one core, and CPU milliseconds of each, in every round."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tasks = [task(row) for row in rows]
    sources = [row["prompt"] + row["canonical_solution"] for row in rows]
    pools = {tier: Code(ProgramLimits(), tier, size=1) for tier in tiers}
    ways: dict[str, Callable[[], bool]] = {
        tier: lambda code=code: all(grade.score == 1.0 for grade in code.grade(tasks, sources))
        for tier, code in pools.items()
    }
    for name, flags in (("python -c", ()), ("python -I -S -c", ("-I", "-S"))):
        ways[name] = lambda flags=flags: not any(bare(*pair, *flags) for pair in zip(sources, rows, strict=True))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for way in ways.values():
        assert way()  # warm
    for _ in range(rounds):
        for name, way in ways.items():
            clock, cpu_s = time.perf_counter(), all_cpu_s()
            assert way()
            found[name].append((time.perf_counter() - clock, all_cpu_s() - cpu_s))
    for code in pools.values():
        code.close()
    return {
        name: {
            "per second": [round(len(rows) / wall_s, 1) for wall_s, _ in each],
            "CPU ms": [round(1000 * cpu_s / len(rows), 2) for _, cpu_s in each],
            "median per second": round(len(rows) / median(wall_s for wall_s, _ in each), 1),
            "median CPU ms": round(1000 * median(cpu_s for _, cpu_s in each) / len(rows), 2),
        }
        for name, each in found.items()
    }


if __name__ == "__main__":
    main()
