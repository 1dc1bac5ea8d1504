"""A reward or an environment of a run's author, called with plain data.

Invariant: `random` starts again with every call and the hash seed is fixed, so code that only reads its arguments
answers the same everywhere. An environment is made anew for each call.

`load` comes first: where the run is trusted in the server that all calls are forked from, otherwise as the first call of
each child. Then a call is None, answered by "class" or "function"; [task as dict, completion], answered by a score; or
[task as dict, seed, turns], answered by text or none.
"""

import json
import random
import sys
import types
from typing import Any

from shoal.sandbox.channel import described as last_line

author: dict[str, Any] = {}  # once loaded: `file`, and what is `named`


def load(file: str, source: str, name: str) -> None:
    author["file"] = file
    sys.modules["own"] = module = types.ModuleType("own")
    exec(compile(source, file, "exec"), module.__dict__)
    author["named"] = getattr(module, name)


def answer(call: list[Any] | None) -> Any:
    if not author:
        assert call is not None
        return load(*call)
    is_class = isinstance(author["named"], type)
    if call is None:
        return "class" if is_class else "function"
    random.seed(0)
    task, *rest = call
    parsed = {key: json.loads(task[key]) if task[key] else {} for key in ("tests", "metadata")}
    seen = types.SimpleNamespace(**(task | parsed))
    return respond(seen, *rest) if is_class else score(author["named"](seen, *rest))


def respond(task: Any, seed: int, turns: list[str]) -> str | None:
    text = author["named"]().respond(task, seed, turns)
    if not isinstance(text, str | None):
        raise TypeError(f"respond returned {type(text).__name__} {str(text)[:60]!r} in place of text or None")
    return text


def score(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"it returned {type(value).__name__} {str(value)[:60]!r} in place of a number")
    return float(value)


def described(error: BaseException) -> str:
    """Return the last line of its traceback, and the deepest line of the author's file that it passed."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == author.get("file"):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return last_line(error) + (f" ({author['file']}, line {lines[-1]})" if lines else "")
