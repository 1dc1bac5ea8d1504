"""Inside the sandbox, or in a plain process where the run is trusted: calls a reward or an environment of your own.

Invariant: `random` starts again with every call and the hash seed is fixed, so code that only reads its arguments
answers the same everywhere. An environment is made anew for each call. Sent by `own` as the program.

setup   [file, source, name]             R0   a function: it takes one completion a call
                                         R1   it takes a batch
                                         R2   a class: an environment
                                         X    text: what the file raised
call    [tasks as dicts, completions]    V    one score for each
        [task as dict, seed, turns]      V    an environment's answer, text or none
                                         X    text: what the code raised, or returned in place of the above
"""

import os
import random
import sys
import types
from typing import Any

from shoal.sandbox import channel
from shoal.tasks.rewards.wire import pack, unpack


def main() -> None:
    file, source, name = unpack(channel.receive() or b"")
    sys.modules["own"] = module = types.ModuleType("own")
    try:
        exec(compile(source, file, "exec"), module.__dict__)
        found = getattr(module, name)
        environment = isinstance(found, type)
        code = None if environment else found.__code__
        batched = code is not None and code.co_varnames[: code.co_argcount][:2] == ("tasks", "completions")
    except BaseException as error:  # noqa: BLE001 - the file may raise anything
        return channel.send(b"X" + last_line(error, file))
    channel.send(b"R2" if environment else b"R1" if batched else b"R0")
    while (frame := channel.receive()) is not None:
        random.seed(0)
        try:
            value = answer(found, *unpack(frame)) if environment else scores(found, batched, *unpack(frame))
            channel.send(b"V" + pack(value))
        except BaseException as error:  # noqa: BLE001 - shown to those who ask why a score is 0
            channel.send(b"X" + last_line(error, file))
    os._exit(0)


def answer(environment: Any, task: dict[str, str], seed: int, turns: list[str]) -> str | None:
    text = environment().respond(readable(task), seed, turns)
    if not isinstance(text, str | None):
        raise TypeError(f"respond returned {type(text).__name__} {str(text)[:60]!r} in place of text or None")
    return text


def scores(function: Any, batched: bool, tasks: list[dict[str, str]], completions: list[str]) -> list[float]:
    shown = [readable(task) for task in tasks]
    if not batched:
        return [score(function(task, completion)) for task, completion in zip(shown, completions, strict=True)]
    found = list(function(shown, completions))
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
