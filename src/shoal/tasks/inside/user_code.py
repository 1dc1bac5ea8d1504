"""Run a reward or an environment that a run's author wrote, on plain data.

Invariant: `random` is seeded again for every call and the hash seed is fixed, so code that only reads its arguments
gives the same result everywhere. Each call creates a new environment.

If the run is trusted, `load` runs once, in the server that all calls are forked from. Otherwise each call carries the
code to load. A call is [code to load or None, arguments]. Each line shows arguments and their result:

    None                         "class" or "function", whichever the loaded object is
    [task as dict, completion]   the score that the function returns
    [task as dict, seed, turns]  the answer of an environment of the class, or None
"""

import json
import random
import sys
import types
from typing import Any

from shoal.sandbox.channel import describe as last_line

loaded: dict[str, Any] = {}  # `path` of the file, and the `object` of the requested name


def load(path: str, source: str, name: str) -> None:
    loaded["path"] = path
    sys.modules["user_code"] = module = types.ModuleType("user_code")
    exec(compile(source, path, "exec"), module.__dict__)
    loaded["object"] = getattr(module, name)


def answer(call: list[Any]) -> Any:
    to_load, arguments = call
    if to_load:
        load(*to_load)
    function = loaded["object"]
    is_class = isinstance(function, type)
    if arguments is None:
        return "class" if is_class else "function"
    random.seed(0)
    task, *rest = arguments
    parsed = {key: json.loads(task[key]) if task[key] else {} for key in ("tests", "metadata") if key in task}
    seen = types.SimpleNamespace(**(task | parsed))
    return as_text(function().respond(seen, *rest)) if is_class else as_score(function(seen, *rest))


def as_text(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise TypeError(f"respond returned {type(value).__name__} {str(value)[:60]!r} instead of text or None")
    return value


def as_score(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"it returned {type(value).__name__} {str(value)[:60]!r} instead of a number")
    return float(value)


def describe(error: BaseException) -> str:
    """Return the traceback's last line, and the number of its innermost line in the author's file."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == loaded.get("path"):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return last_line(error) + (f" ({loaded['path']}, line {lines[-1]})" if lines else "")
