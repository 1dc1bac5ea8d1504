"""Run a completion's code inside the sandbox, and answer calls of its functions with plain data.

Invariant: no expected value ever reaches this process. The model's code may change everything in this process, but that
changes only its own answers. Each frame is answered with one frame:

setup   [source, prompt, entry]         R   ready
                                        P   text: the source does not parse
                                        X   [type, message]: the source raised
call    8 bytes, then [args, kwargs]    the same 8 bytes, then
                                        V   value
                                        X   [type, message]: the function raised
                                        U   text: the value is not plain data
"""

import ast
import os
import sys
import textwrap
import types
from typing import Any

from shoal.sandbox.channel import DEPTH, WireError, pack, receive, send, unpack

NAME = "candidate"
# LiveCodeBench's harness puts these imports and this limit before a solution, because many solutions omit them.
MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json
builtins typing"""
RECURSION = 50_000
COMMON: dict[str, Any] = {}
for module in MODULES.split():
    exec(f"from {module} import *", COMMON)
exec(f"import {', '.join(MODULES.split())}", COMMON)
COMMON = {name: value for name, value in COMMON.items() if not name.startswith("__")}


def script(source: str, names: dict[str, Any]) -> None:
    """Run a program that reads stdin. `names`: the namespace of `__main__`."""
    sys.setrecursionlimit(RECURSION)
    names.pop("inside")
    names.update(COMMON, stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)  # those of this process
    exec(compile(source, "program.py", "exec"), names)


def main() -> None:
    sys.setrecursionlimit(RECURSION)
    source, prompt, entry = unpack(receive() or b"")
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    module.__dict__.update((name, value) for name, value in COMMON.items() if not prompt and name != entry)
    try:
        parts = programs(source, prompt, entry)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return send(b"P" + describe(error)[1].encode(errors="replace"))
    try:
        for part in parts:
            exec(part, module.__dict__)
        function = find(module, entry)
    except BaseException as error:  # noqa: BLE001 - the model's code may raise anything
        return send(b"X" + pack(describe(error)))
    send(b"R")
    while (frame := receive()) is not None:
        send(frame[:8] + answer(function, frame[8:]))
    os._exit(0)


def programs(source: str, prompt: str, entry: str) -> list[Any]:
    """Return the code objects to execute, in order.

    If there is a prompt, the completion is a whole function, or the rest of the function that the prompt begins.
    """
    if not prompt:
        return [compile(source, NAME, "exec")]
    try:
        tree = ast.parse(source)
        if any(getattr(node, "name", "") == entry for node in tree.body):
            return [compile(prompt + "\n    pass\n", "prompt", "exec"), compile(tree, NAME, "exec")]
    except SyntaxError:
        pass  # it may be the indented rest of a function
    try:
        return [compile(f"{prompt}\n{source}", NAME, "exec")]
    except SyntaxError:
        return [compile(f"{prompt}\n{textwrap.indent(source, '    ')}", NAME, "exec")]


def find(module: types.ModuleType, entry: str) -> Any:
    if hasattr(module, entry):
        return getattr(module, entry)
    if hasattr(module, "Solution"):
        return getattr(module.Solution(), entry)
    raise NameError(f"the program defines no {entry}")


def answer(function: Any, call: bytes) -> bytes:
    args, kwargs = unpack(call, depth=-DEPTH)
    try:
        value = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - reported to the caller
        return b"X" + pack(describe(error))
    try:
        return b"V" + pack(value)
    except WireError as error:
        return b"U" + str(error).encode(errors="replace")
    except BaseException as error:  # noqa: BLE001 - an overridden method
        return b"X" + pack(describe(error))


def describe(error: BaseException) -> list[str]:
    """Return the name of the most specific builtin type of an exception, and its message."""
    kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
    try:
        message = str(error)[:500]
    except BaseException:  # noqa: BLE001 - an overridden method
        message = ""
    return [kind.__name__, message if type(error) is kind else f"{type(error).__name__}: {message}"[:500]]
