"""Run a task's tests inside a second sandbox. Their `candidate` calls the completion's function in another process.

Invariant: the model's code never runs here. Its answers arrive as plain data, so the tests compare builtins. Only the
frame P means that the tests passed. It is sent after all tests ran.

in      [tests, prompt, entry], once
out     C [args, kwargs]: a call, which is answered with V value, X [type, message] or U text, as in `candidate`
        P: the tests passed
        F text: an assertion failed, or the tests raised
        T text: the tests themselves are at fault
"""

import builtins
import os
from typing import Any

from shoal.sandbox.channel import DEPTH, WireError, pack, receive, send, unpack

# `rebuilt` replaces these by a RuntimeError, because a StopIteration would end `all(map(...))` early with True.
NOT_RAISED = (StopIteration, StopAsyncIteration)


class BadAnswerError(BaseException):
    """The candidate's answer is not plain data. `except Exception` in the tests does not catch it."""


class UncallableError(BaseException):
    """The tests pass an argument that is not plain data."""


def main() -> None:
    tests, prompt, entry = unpack(receive() or b"")
    try:
        # The prompt may define functions that the tests use.
        helpers = compile(prompt + "\n    pass\n" if prompt else "", "prompt", "exec")
        code = compile(tests, "tests", "exec")
    except (SyntaxError, ValueError) as error:
        send(b"T" + text(error))
        return
    try:
        check(helpers, code, entry)
        send(b"P")
    except UncallableError as error:
        send(b"T" + text(error))
    except BaseException as error:  # noqa: BLE001 - an assertion failed, or the tests got an unexpected answer
        send(b"F" + text(error))
    os._exit(0)


def check(helpers: Any, tests: Any, entry: str) -> None:
    names: dict[str, Any] = {"__name__": "tests"}
    exec(helpers, names)
    names["candidate"] = names[entry] = candidate
    names.pop("check", None)
    exec(tests, names)
    if "check" in names:
        names["check"](candidate)


def candidate(*args: Any, **kwargs: Any) -> Any:
    try:
        call = pack([list(args), kwargs], depth=-DEPTH)  # an argument may be an earlier answer, nested up to DEPTH
    except WireError as error:
        raise UncallableError(f"the tests pass an argument that is {error}") from None
    send(b"C" + call)
    answer = receive()
    if not answer:
        os._exit(1)  # the caller has closed the channel
    kind = answer[:1]
    if kind == b"U":
        raise BadAnswerError(answer[1:].decode(errors="replace"))
    try:
        value = unpack(answer[1:])
        name, message = value if kind == b"X" else ("", "")
    except (ValueError, TypeError, RecursionError) as error:
        raise BadAnswerError(f"not readable: {error}") from None
    if kind == b"X":
        raise rebuilt(name, message)
    return value


def rebuilt(name: Any, message: Any) -> Exception:
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_RAISED):
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError and others need more arguments
            pass
    return RuntimeError(f"{name}: {message}")


def text(error: BaseException) -> bytes:
    try:
        message = str(error)[:500]
    except ValueError:  # an int of too many digits
        message = ""
    kind = "answer" if isinstance(error, BadAnswerError) else type(error).__name__
    return (f"{kind}: {message}" if message else kind).encode(errors="replace")
