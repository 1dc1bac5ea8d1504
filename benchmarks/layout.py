"""Print the package's layout in numbers: rooms, floors, imports, files, lines, fields and commands.

    python -m benchmarks.layout                                     this checkout
    python -m benchmarks.layout ../before/src/shoal src/shoal       two trees side by side, as a Markdown table

A room is a folder or a module at the root of the package, except `__init__.py` and `__main__.py`. Imports are read from the
source, wherever they are in a file. A room's floor is one more than the highest floor that it imports. Rooms that import
each other, directly or through others, are a cycle and share a floor. Within a cycle, an import is upward if the importing
room comes before the imported one. The cycle's rooms are put in the order that has the fewest upward imports.

A function counts as used once if its name occurs in the package only once outside its definition. Config fields and commands
are read from the imported package, if this interpreter can import it. tests/test_layout.py checks which imports are allowed.
"""

import argparse
import ast
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "shoal"
CYCLE_LIMIT = 8  # maximum rooms in a cycle; there is a limit because every order is tried
SMALL = 80  # lines
FIELDS = """
from benchmarks.common.machine import ROOT
from shoal.config import Config
def count(section):
    return sum(count(inner) if (inner := model(field.annotation)) else 1 for field in section.model_fields.values())
def model(annotation):
    inner = [annotation, *getattr(annotation, "__args__", ())]
    return next((part for part in inner if isinstance(part, type) and hasattr(part, "model_fields")), None)
print(count(Config))
"""
COMMANDS = """
import argparse
from shoal.cli.main import command_line
actions = [action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)]
print(len(actions[0].choices))
"""

Edges = Counter[tuple[str, str]]  # (importing room, imported room) -> modules that import it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, default=[ROOT / "src" / PACKAGE], metavar="SRC")
    sources = parser.parse_args().sources
    columns = [measure(source) for source in sources]
    rows = list(dict.fromkeys(name for column in columns for name in column))
    sys.stdout.write(f"| | {' | '.join(map(str, sources))} |\n| --- |{' --- |' * len(sources)}\n")
    for name in rows:
        sys.stdout.write(f"| {name} | {' | '.join(column.get(name, '–') for column in columns)} |\n")


def measure(source: Path) -> dict[str, str]:
    """Return every figure of one tree by its name, in the order to print."""
    modules = read_modules(source)
    if not modules:
        raise SystemExit(f"{source} has no Python module; give the package's folder, such as src/{PACKAGE}")
    rooms = sorted({room(name) for name in modules} - {"", "__main__"})
    loose = [name for name in rooms if modules.get(name, Path()).name == f"{name}.py"]
    edges = room_imports(modules)
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    importers = Counter(
        other for name, path in modules.items() for other in imported_modules(name, path, modules) - {name}
    )
    figures = {
        "modules at the root": str(len(loose)),
        "rooms, modules at the root included": str(len(rooms)),
        "floors": str(max(floors(rooms, edges).values())),
        "rooms in an import cycle": str(sum(len(cycle) for cycle in cycles(rooms, edges))),
        "imports that run upwards": str(sum(upward(cycle, edges) for cycle in cycles(rooms, edges))),
        "files": str(len(modules)),
        "lines": f"{sum(lines.values()):,}",
        "median lines of a file": f"{statistics.median(lines.values()):.0f}",
        f"files below {SMALL} lines": str(sum(n < SMALL for n in lines.values())),
        "files with one importer": str(sum(importers[name] == 1 for name in modules)),
        "functions used once": str(used_once(modules)),
        "config fields": printed(FIELDS, source),
        "commands": printed(COMMANDS, source),
        "most files in one folder": str(max(Counter(path.parent for path in modules.values()).values())),
        "longest file, lines": str(max(lines.values())),
    }
    for name in rooms:
        if name not in loose:
            own = [module for module in modules if room(module) == name]
            figures[f"`{name}`: files, lines"] = f"{len(own)}, {sum(lines[module] for module in own):,}"
    return figures


def read_modules(source: Path) -> dict[str, Path]:
    """Return every module by its dotted name below the package. The root's name is empty."""
    named = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imported_modules(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of this package that a module imports. The empty name is the root."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return {_module(absolute, modules) for absolute in _imported(ast.parse(path.read_text()), package)}


def used_once(modules: dict[str, Path]) -> int:
    """Return how many functions and methods have a name that the package uses only once."""
    trees = [ast.parse(path.read_text()) for path in modules.values()]
    words = Counter(word for path in modules.values() for word in re.findall(r"\w+", path.read_text()))
    defined = Counter(
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sum(n == 1 and words[name] == 2 for name, n in defined.items())


def printed(program: str, source: Path) -> str:
    """Run a program that imports the package from `source`. Return its output, or a dash if it cannot run."""
    if source.name != PACKAGE:
        return "–"
    environment = os.environ | {"PYTHONPATH": str(source.resolve().parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "–"


def room(module: str) -> str:
    return module.partition(".")[0]


def room_imports(modules: dict[str, Path]) -> Edges:
    """Return for each pair of rooms how many modules of the first import the second."""
    edges: Edges = Counter()
    for name, path in modules.items():
        met = {room(other) for other in imported_modules(name, path, modules)}
        edges.update((room(name), other) for other in met - {room(name), ""})
    return Counter({edge: n for edge, n in edges.items() if edge[0] not in ("", "__main__")})


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the absolute names of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = [PACKAGE, *package.split(".")] if package else [PACKAGE]
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _module(absolute: str, modules: dict[str, Path]) -> str:
    """Return the module of this package that defines an absolute name, or "" for other packages."""
    parts = absolute.split(".")
    if parts[0] != PACKAGE:
        return ""
    while parts[1:] and ".".join(parts[1:]) not in modules:
        parts.pop()
    return ".".join(parts[1:])


def reached(start: str, edges: Edges) -> set[str]:
    result: set[str] = set()
    waiting = [start]
    while waiting:
        new = {other for name, other in edges if name == waiting[-1]} - result
        waiting.pop()
        result |= new
        waiting += new
    return result


def cycles(rooms: list[str], edges: Edges) -> list[tuple[str, ...]]:
    """Return the groups of rooms that import each other, directly or through others."""
    below = {name: reached(name, edges) for name in rooms}
    groups = {tuple(other for other in rooms if other in below[name] and name in below[other]) for name in rooms}
    return sorted(group for group in groups if group)


def upward(cycle: tuple[str, ...], edges: Edges) -> int:
    """Return the number of upward imports in the order of this cycle's rooms that has the fewest."""
    if len(cycle) > CYCLE_LIMIT:
        raise SystemExit(f"a cycle of {len(cycle)} rooms has too many orders to try: {', '.join(cycle)}")
    inside = {edge: n for edge, n in edges.items() if edge[0] in cycle and edge[1] in cycle}
    counts = []
    for order in permutations(cycle):
        place = {name: height for height, name in enumerate(order)}
        counts.append(sum(n for (low, high), n in inside.items() if place[low] < place[high]))
    return min(counts)


def floors(rooms: list[str], edges: Edges) -> dict[str, int]:
    """Return each room's floor, from 1. The rooms of a cycle share a floor."""
    groups = {name: cycle for cycle in cycles(rooms, edges) for name in cycle}
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            group = groups.get(name, (name,))
            below = {other for member, other in edges if member in group and other not in group}
            heights.update(dict.fromkeys(group, 1 + max(map(height, below), default=0)))
        return heights[name]

    return {name: height(name) for name in rooms}


if __name__ == "__main__":
    main()
