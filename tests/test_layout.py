"""Who imports whom, read from the source: the layout that DESIGN section 6 promises, and its exceptions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "shoal"

LEAVES = ["recipe", "config", "messages", "errors", "durable", "pool.identity"]
LIBRARIES = ["model", "toploc", "shardcast", "store", "tasks"]
PROCESSES = ["learner", "rollout", "validator", "pool"]
MAY_BE_IMPORTED_BY_LIBRARIES = [*LEAVES, *LIBRARIES]

SHARED_BY_PROCESSES = {"pool.identity"}  # everybody signs, and checks what others signed


def modules() -> dict[str, Path]:
    """Every module of the package by its name without `shoal.`; a package is called as its folder."""
    names = {path: path.relative_to(SRC).with_suffix("").parts for path in sorted(SRC.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


MODULES = modules()


def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imported(name: str) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it."""
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


def own(name: str) -> set[str]:
    """The modules of Shoal that a module imports, without `shoal.`."""
    found = set()
    for absolute in imported(name):
        parts = absolute.split(".")
        if parts[0] != "shoal":
            continue
        while parts[1:] and ".".join(parts[1:]) not in MODULES:
            parts.pop()  # what is left is the module, not a name in it
        found.add(".".join(parts[1:]))
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def members(package: str) -> list[str]:
    return [name for name in MODULES if within(name, package)]


def strangers(package: str, allowed: list[str]) -> dict[str, set[str]]:
    """What the modules of a package import of Shoal beyond itself and `allowed`, by module."""
    found = {
        name: {other for other in own(name) if other and not any(within(other, one) for one in [package, *allowed])}
        for name in members(package)
    }
    return {name: others for name, others in found.items() if others}


def test_this_reads_imports_as_python_does() -> None:
    assert "config" in own("cli") and "swarm" in own("cli")  # `from shoal import config`, and one in a function
    assert "shardcast.client" in own("shardcast.follow")  # relative
    assert "store.rollouts" in own("learner.groups")
    assert not own("messages")


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_import_nobody(leaf: str) -> None:
    assert strangers(leaf, ["durable", "recipe"]) == {}, "but the one that only talks to the disk, and the recipe"


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_import_no_process(library: str) -> None:
    assert strangers(library, MAY_BE_IMPORTED_BY_LIBRARIES) == {}


@pytest.mark.parametrize("library", ["toploc", "shardcast"])
def test_what_is_usable_alone_imports_nothing_else_of_shoal(library: str) -> None:
    assert strangers(library, []) == {}


@pytest.mark.parametrize("process", PROCESSES)
def test_processes_never_import_each_other(process: str) -> None:
    met = {
        (name, other)
        for name in members(process)
        for other in own(name)
        for forbidden in PROCESSES
        if forbidden != process and within(other, forbidden) and other not in SHARED_BY_PROCESSES
    }
    assert met == set()


def test_lies_are_kept_apart_from_the_honest_code() -> None:
    honest = [name for name in MODULES if not within(name, "testing")]
    assert [name for name in honest if any(within(other, "testing") for other in own(name))] == []
    # `shoal run` starts a liar as a process, where the config asks for one; the docstring of `roles` names them.
    assert {name for name in honest if "shoal.testing" in MODULES[name].read_text()} == {"swarm", "roles"}


def test_nothing_is_ever_unpickled() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for name in MODULES:
        found = {absolute.split(".")[0] for absolute in imported(name)} & forbidden
        assert not found, f"{name} imports {found}"
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


def test_every_module_says_what_it_is() -> None:
    assert [name for name in MODULES if not ast.get_docstring(tree(name))] == []


def test_the_package_is_two_levels_deep_and_its_files_are_short() -> None:
    assert {name for name in MODULES if name.count(".") > 1} == set()
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > 300} == {}
