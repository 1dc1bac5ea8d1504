"""Looks at the file of a reward or an environment of your own before a run starts.

Invariant: the code is parsed, never run, and only where its author is: on the machine that compiles the task set. What
cannot be there is a ConfigError now, not a grader error on every machine later. Called by `compiled.compiling`.
"""

import ast
from typing import TypeVar

from shoal.config import ConfigError

Named = TypeVar("Named", ast.FunctionDef, ast.ClassDef)


def check_function(reward: str, source: bytes) -> None:
    """Whether `source` defines the function that `reward`, "file.py:name", names. Raises ConfigError."""
    function = _named(f"reward {reward!r}", reward, source, ast.FunctionDef, "function")
    if len(_parameters(function)) < 2:
        raise ConfigError(
            f"reward {reward!r}: {function.name} must take (task, completion), or (tasks, completions) for a batch; "
            "change its parameters"
        )


def check_environment(environment: str, source: bytes) -> None:
    """Whether `source` defines the class that `environment`, "file.py:Name", names. Raises ConfigError."""
    what = f"environment {environment!r}"
    found = _named(what, environment, source, ast.ClassDef, "class")
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "respond"]
    if not found.bases and not methods:
        raise ConfigError(f"{what}: {found.name} has no method respond(self, task, seed, turns); add it")
    if methods and len(_parameters(methods[-1])) != 4:
        raise ConfigError(f"{what}: respond must take (self, task, seed, turns); change its parameters")


def _named(what: str, name: str, source: bytes, kind: type[Named], word: str) -> Named:
    path, _, wanted = name.rpartition(":")
    try:
        body = ast.parse(source, path).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{what}: {path} is not valid Python ({error}); correct the file") from error
    nodes = [node for node in body if isinstance(node, kind)]
    found = next((node for node in nodes if node.name == wanted), None)
    if found is None:
        there = f"it has {', '.join(node.name for node in nodes)}" if nodes else "it has none"
        raise ConfigError(f"{what}: {path} has no {word} {wanted!r} ({there}); correct the config or the file")
    return found


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return function.args.posonlyargs + function.args.args
