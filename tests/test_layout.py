"""The rooms import each other only as `ROOMS` allows. test_docs.py compares `ROOMS` with `docs/architecture.md`."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "shoal"

# For each room, the rooms that it imports. All of them come before it in this list.
ROOMS = {
    "errors": [],
    "files": ["errors"],
    "identity": ["errors"],
    "config": ["errors"],
    "evidence": [],
    "toploc": ["evidence"],
    "sandbox": [],
    "shardcast": ["errors", "files", "identity"],
    "model": ["errors", "files"],
    "protocol": ["config", "errors", "files", "identity", "shardcast"],
    "store": ["errors", "files", "model", "protocol"],
    "ledger": ["errors", "files", "protocol"],
    "tasks": ["config", "errors", "files", "model", "protocol", "sandbox"],
    "diloco": ["errors", "files", "protocol"],
    "engine": ["errors", "files", "model"],
    "watch": ["config", "errors", "evidence", "files", "protocol", "shardcast"],
    "coordinator": ["config", "errors", "evidence", "files", "ledger", "protocol", "shardcast", "store", "watch"],
    "learner": ["config", "diloco", "errors", "evidence", "files", "model", "protocol", "shardcast", "store", "tasks"],
    "worker": ["config", "engine", "model", "protocol", "shardcast", "store", "tasks", "toploc"],
    "validator": [
        "config", "engine", "evidence", "files", "ledger", "model", "protocol", "sandbox", "shardcast", "store", "tasks",
        "toploc",
    ],
    "evals": ["config", "engine", "errors", "files", "model", "protocol", "sandbox", "shardcast", "tasks", "watch"],
    "serve": ["config", "engine", "errors", "files", "model", "shardcast", "tasks", "toploc", "validator", "watch"],
    "cli": [
        "config", "coordinator", "diloco", "engine", "errors", "evals", "evidence", "files", "learner", "ledger",
        "model", "protocol", "sandbox", "serve", "shardcast", "store", "tasks", "validator", "watch", "worker",
    ],
}  # fmt: skip
PROCESSES = ["learner", "worker", "validator", "coordinator"]
LIBRARIES = [
    "model",
    "toploc",
    "shardcast",
    "store",
    "tasks",
    "ledger",
    "engine",
    "sandbox",
    "evidence",
    "diloco",
    "watch",
]
ROOT_MODULES = {"", "__main__", "errors", "evidence", "files", "identity"}

SUB_ROOMS = {  # for each part of a room, the parts that it imports; a module that is not listed may import all parts
    "shardcast": {
        "manifest": [],
        "files": ["manifest"],
        "delta": ["files"],
        "store": ["manifest"],
        "connections": [],
        "guard": ["connections", "manifest"],
        "server": ["connections", "guard", "manifest", "store"],
        "fetch": ["delta", "files", "manifest"],
        "origin": ["delta", "files", "manifest", "store"],
        "relay": ["fetch", "manifest", "store"],
        "alone": ["fetch", "manifest", "origin", "relay", "server", "store"],
    },
    "coordinator": {
        "folder": [],
        "http": ["folder"],
    },
}


def modules() -> dict[str, Path]:
    """Return the path of every module by its name without `shoal.`. A package is listed under its folder's name."""
    names = {path: path.relative_to(SRC).with_suffix("").parts for path in sorted(SRC.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


MODULES = modules()


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imported(name: str) -> Iterator[str]:
    """Yield the absolute names of everything that a module imports, even inside functions."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["shoal", *package.split(".")] if package else ["shoal"]
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def own(name: str) -> set[str]:
    """Return the modules of Shoal that a module imports, without `shoal.`."""
    result = set()
    for absolute in imported(name):
        parts = absolute.split(".")
        if parts[0] != "shoal":
            continue
        while parts[1:] and ".".join(parts[1:]) not in MODULES:
            parts.pop()  # the last part is a name defined in a module
        result.add(".".join(parts[1:]))
    return result


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def members(package: str) -> list[str]:
    return [name for name in MODULES if within(name, package)]


def room(name: str) -> str:
    return name.partition(".")[0]


def reached(start: str) -> set[str]:
    """Return every module that importing `start` imports, directly or indirectly, including packages."""
    result: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in result:
            continue
        result.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:n]) for n in range(1, len(parts))]
        waiting += own(name) - {""}
    return result


def test_imports_are_read_as_python_reads_them() -> None:
    started = own("cli.training")
    assert "config" in started and "cli.launch.swarm" in started  # the latter inside a function
    assert "shardcast.fetch.source" in own("shardcast.fetch.client")
    assert "store.rollouts" in own("learner.groups")
    assert not own("errors")
    assert "protocol.identity" in reached("learner.loop") and "protocol.identity" not in own("learner.loop")


def test_the_package_has_exactly_the_listed_rooms_and_root_modules() -> None:
    assert {name for name in MODULES if "." not in name and MODULES[name].name != "__init__.py"} == ROOT_MODULES - {""}
    assert {room(name) for name in MODULES} == set(ROOMS) | ROOT_MODULES


def test_a_room_may_import_only_rooms_listed_before_it() -> None:
    for number, (name, allowed) in enumerate(ROOMS.items()):
        assert set(allowed) <= set(list(ROOMS)[:number]), name


@pytest.mark.parametrize("name", list(ROOMS))
def test_a_room_imports_exactly_the_rooms_listed_for_it(name: str) -> None:
    imports = {room(other) for module in members(name) for other in own(module)} - {name, ""}
    assert imports == set(ROOMS[name])


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_no_other_process_even_indirectly(process: str) -> None:
    others = set(PROCESSES) - {process}
    for name in members(process):
        processes = {other for other in reached(name) if room(other) in others}
        assert processes == set(), f"{name} imports {processes}, directly or indirectly"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_imports_no_process_even_indirectly(library: str) -> None:
    processes = {*PROCESSES, "evals", "serve", "cli"}
    for name in members(library):
        assert {other for other in reached(name) if room(other) in processes} == set()


@pytest.mark.parametrize("outer", list(SUB_ROOMS))
def test_parts_of_a_room_import_exactly_the_parts_listed_for_them(outer: str) -> None:
    def sub_room(name: str) -> str:
        inner = name.split(".")[1] if name.startswith(outer + ".") else ""
        is_folder = inner and MODULES[f"{outer}.{inner}"].name == "__init__.py"
        return inner if inner in order or is_folder else ""

    order = list(SUB_ROOMS[outer])
    assert all(set(allowed) <= set(order[:n]) for n, allowed in enumerate(SUB_ROOMS[outer].values()))
    imports: dict[str, set[str]] = {name: set() for name in order}
    for module in members(outer):
        if sub_room(module):
            imports[sub_room(module)] |= {sub_room(other) for other in own(module)} - {sub_room(module), ""}
    assert imports == {name: set(allowed) for name, allowed in SUB_ROOMS[outer].items()}


def test_nothing_is_ever_unpickled() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for name in MODULES:
        pickles = {absolute.split(".")[0] for absolute in imported(name)} & forbidden
        assert not pickles, f"{name} imports {pickles}"
        loads = {
            ast.unparse(node.func)
            for node in ast.walk(tree(name))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"torch.load", "torch.jit.load", "torch.hub.load"}
        }
        assert not loads, f"{name} calls {loads}"
        pickled = [
            node
            for node in ast.walk(tree(name))
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
        ]
        assert not pickled, f"{name} allows pickles"


def test_every_module_has_a_docstring() -> None:
    assert [name for name in MODULES if not ast.get_docstring(tree(name))] == []
