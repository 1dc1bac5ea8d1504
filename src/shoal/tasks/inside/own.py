"""A reward or an environment of a run's author, called with plain data.

Invariant: `random` starts again with every call and the hash seed is fixed, so code that only reads its arguments
answers the same everywhere. An environment is made anew for each call.

The first call is [file, source, name], answered by what the name is; each further one is [tasks as dicts, completions],
answered by a score for each, or [task as dict, seed, turns], answered by text or none.
"""

import json
import random
import sys
import types
from typing import Any

from shoal.sandbox.channel import described, serve

FUNCTION, BATCH_FUNCTION, CLASS = "function", "batch function", "class"


class Author:
    """The author's code, once the first call has named it."""

    def __init__(self) -> None:
        self.file, self.kind = "", ""
        self.named: Any = None

    def answer(self, call: list[Any]) -> Any:
        if not self.kind:
            return self.load(*call)
        random.seed(0)
        return respond(self.named, *call) if self.kind == CLASS else scores(self.named, self.kind, *call)

    def load(self, file: str, source: str, name: str) -> str:
        self.file = file
        sys.modules["own"] = module = types.ModuleType("own")
        exec(compile(source, file, "exec"), module.__dict__)
        self.named = named = getattr(module, name)
        code = None if isinstance(named, type) else named.__code__
        batched = code is not None and code.co_varnames[: code.co_argcount][:2] == ("tasks", "completions")
        self.kind = CLASS if code is None else BATCH_FUNCTION if batched else FUNCTION
        return self.kind

    def described(self, error: BaseException) -> str:
        """Return the last line of its traceback, and the deepest line of the author's file that it passed."""
        lines, trace = [], error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file:
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        return described(error) + (f" ({self.file}, line {lines[-1]})" if lines else "")


def main() -> None:
    author = Author()
    serve(author.answer, author.described)


def respond(environment: Any, task: dict[str, str], seed: int, turns: list[str]) -> str | None:
    text = environment().respond(readable(task), seed, turns)
    if not isinstance(text, str | None):
        raise TypeError(f"respond returned {type(text).__name__} {str(text)[:60]!r} in place of text or None")
    return text


def scores(function: Any, kind: str, tasks: list[dict[str, str]], completions: list[str]) -> list[float]:
    seen = [readable(task) for task in tasks]
    if kind == FUNCTION:
        return [score(function(task, completion)) for task, completion in zip(seen, completions, strict=True)]
    values = list(function(seen, completions))
    if len(values) != len(tasks):
        raise ValueError(f"{len(values)} scores for {len(tasks)} completions")
    return [score(value) for value in values]


def readable(task: dict[str, str]) -> Any:
    """Return the task as an object; `tests` and `metadata` are parsed."""
    parsed = {key: json.loads(task[key]) if task[key] else {} for key in ("tests", "metadata")}
    return types.SimpleNamespace(**(task | parsed))


def score(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"it returned {type(value).__name__} {str(value)[:60]!r} in place of a number")
    return float(value)
