"""Inside the sandbox, or in a plain process where the run is trusted: calls a reward of your own.

Invariant: `random` starts again with every call and the hash seed is fixed, so a function that only reads its
arguments gives the same score everywhere. Sent by `own` as the program.

setup   [file, source, function]         R0   it takes one completion a call
                                         R1   it takes a batch
                                         X    text: what the file raised
call    [tasks as dicts, completions]    V    one score for each
                                         X    text: what the function raised, or returned in place of a score
"""

import os
import random
import types
from typing import Any

from shoal.sandbox import channel
from shoal.tasks.rewards.wire import pack, unpack


def main() -> None:
    file, source, name = unpack(channel.receive() or b"")
    module = types.ModuleType("reward")
    try:
        exec(compile(source, file, "exec"), module.__dict__)
        function = getattr(module, name)
        code = function.__code__
        batched = code.co_varnames[: code.co_argcount][:2] == ("tasks", "completions")
    except BaseException as error:  # noqa: BLE001 - the file may raise anything
        return channel.send(b"X" + last_line(error, file))
    channel.send(b"R1" if batched else b"R0")
    while (frame := channel.receive()) is not None:
        tasks, completions = unpack(frame)
        random.seed(0)
        try:
            found = call(function, [readable(task) for task in tasks], completions, batched)
            channel.send(b"V" + pack(found))
        except BaseException as error:  # noqa: BLE001 - shown to those who ask why a score is 0
            channel.send(b"X" + last_line(error, file))
    os._exit(0)


def call(function: Any, tasks: list[Any], completions: list[str], batched: bool) -> list[float]:
    if not batched:
        return [score(function(task, completion)) for task, completion in zip(tasks, completions, strict=True)]
    found = list(function(tasks, completions))
    if len(found) != len(tasks):
        raise ValueError(f"{len(found)} scores for {len(tasks)} completions")
    return [score(value) for value in found]


def readable(task: dict[str, str]) -> Any:
    """The task as an object; `tests` and `metadata` are parsed."""
    import json

    parsed = {key: json.loads(task[key]) if task[key] else {} for key in ("tests", "metadata")}
    return types.SimpleNamespace(**(task | parsed))


def score(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"it returned {type(value).__name__} {str(value)[:60]!r} in place of a number")
    return float(value)


def last_line(error: BaseException, file: str) -> bytes:
    """The error as a traceback's last line gives it, and the deepest line of the file that it passed."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    where = f" ({file}, line {lines[-1]})" if lines else ""
    try:
        message = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - an overridden method
        message = type(error).__name__
    return (message[:400] + where).encode(errors="replace")
