"""Looks at the file of a reward of your own before a run starts.

Invariant: the code is parsed, never run, and only where its author is: on the machine that compiles the task set. A function
that cannot be there is a ConfigError now, not a grader error on every machine later. Called by `compiled.compiling`.
"""

import ast

from shoal.config import ConfigError


def check_function(reward: str, source: bytes) -> None:
    """Whether `source` defines the function that `reward`, "file.py:name", names. Raises ConfigError."""
    path, _, name = reward.rpartition(":")
    try:
        body = ast.parse(source, path).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"reward {reward!r}: {path} is not valid Python ({error}); correct the file") from error
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    found = next((function for function in functions if function.name == name), None)
    if found is None:
        there = f"it has {', '.join(one.name for one in functions)}" if functions else "it has none"
        raise ConfigError(
            f"reward {reward!r}: {path} has no function {name!r} ({there}); correct the config or the file"
        )
    if len(found.args.posonlyargs + found.args.args) < 2:
        raise ConfigError(
            f"reward {reward!r}: {name} must take (task, completion), or (tasks, completions) for a batch; change its "
            "parameters"
        )
