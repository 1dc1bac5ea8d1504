"""HumanEval's problems, and mutants: solutions that differ from the canonical one in one place and fail the tests."""

import ast
import copy
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.tasks import Task

COMPARISONS = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mod: ast.Mult}
OPERATORS |= {ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
TIMEOUT_S = 3.0


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def task(row: dict[str, str]) -> Task:
    tests = {"kind": "asserts", "entry": row["entry_point"], "code": row["test"], "prompt": row["prompt"]}
    return Task(row["task_id"], row["prompt"], "", tests=json.dumps(tests))


def mutant(row: dict[str, str]) -> str:
    """Return the first changed solution that fails the tests."""
    return next(source for source in mutants(row) if exit_status(source, row) not in (0, None))


def mutants(row: dict[str, str]) -> Iterator[str]:
    """Yield every solution that differs from the canonical one in one place."""
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    for number in range(len(places(tree, row["entry_point"]))):
        changed = copy.deepcopy(tree)
        if change(places(changed, row["entry_point"])[number]):
            yield ast.unparse(ast.fix_missing_locations(changed))


def places(tree: ast.Module, entry_point: str) -> list[ast.AST]:
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point)
    return [node for statement in function.body for node in ast.walk(statement)]


def change(place: ast.AST) -> bool:
    """Change one node so that the solution is probably wrong. Return False if the node offers nothing to change."""
    if isinstance(place, ast.Compare) and type(place.ops[0]) in COMPARISONS:
        place.ops[0] = COMPARISONS[type(place.ops[0])]()
    elif isinstance(place, ast.BinOp) and type(place.op) in OPERATORS:
        place.op = OPERATORS[type(place.op)]()
    elif isinstance(place, ast.BoolOp):
        place.op = ast.And() if isinstance(place.op, ast.Or) else ast.Or()
    elif isinstance(place, ast.Constant) and isinstance(place.value, int) and not isinstance(place.value, bool):
        place.value += 1
    elif isinstance(place, ast.Return) and place.value is not None:
        place.value = ast.Tuple([place.value, ast.Constant("changed")], ast.Load())
    else:
        return False
    return True


def exit_status(source: str, row: dict[str, str]) -> int | None:
    """Run a program with its tests, without a sandbox. Return its exit status, or None if it does not end."""
    text = f"{source}\n{row['test']}\ncheck({row['entry_point']})\n"
    try:
        return subprocess.run([sys.executable, "-c", text], timeout=TIMEOUT_S, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        return None
