"""Message channel between a program and the outside (`import channel`): frames, and plain data as bytes.

A frame is its length (4 bytes, big-endian), then that many bytes. Plain data are numbers, text, bytes, booleans, None,
lists, tuples, sets and dicts: no pickle, no objects, no code. A value begins with a one-byte tag: N None, T True,
F False, I int (two's complement), D float, C complex, S text, B bytes, L list, U tuple, E set, Z frozenset, M dict.
After every tag but N, T and F comes a length (4 bytes, big-endian), then that many bytes, values, or pairs of a dict.
Invariant: `unpack` returns only builtins, so no method that a program overrides is ever called outside. The frame's
length bounds the size of a value, and DEPTH bounds its nesting. This file runs inside and outside the sandbox, so it
imports only modules that the server preloads.
Left out: object identity, generators, objects of other classes. Outside, `process.py` limits the size of frames.
"""

import os
import struct
from collections.abc import Callable
from typing import Any

INCOMING, OUTGOING = 3, 4
DEPTH = 60
LISTS: dict[str, Any] = {"L": list, "U": tuple, "E": set, "Z": frozenset}
SEQUENCES: dict[Any, str] = {kind: tag for tag, kind in LISTS.items()}
TYPES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
MAX_ERROR = 500  # characters


def receive() -> bytes | None:
    """Return the next frame, or None at the end of the stream."""
    head = _read(4)
    return None if len(head) < 4 else _read(int.from_bytes(head, "big"))


def send(frame: bytes) -> None:
    data = memoryview(len(frame).to_bytes(4, "big") + frame)
    while data:
        data = data[os.write(OUTGOING, data) :]


def _read(size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(INCOMING, min(size, 1 << 16))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def describe(error: BaseException) -> str:
    """Return the last line of an error's traceback, at most MAX_ERROR characters."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR]
    except BaseException:  # noqa: BLE001 - the error's class may override __str__
        return type(error).__name__[:MAX_ERROR]


def serve(function: Callable[[Any], Any], describe: Callable[[BaseException], str] = describe) -> None:
    """Call `function` with the value of each frame until the stream ends. Reply V and the result, or X and the error."""
    while (frame := receive()) is not None:
        try:
            send(b"V" + pack(function(unpack(frame))))
        except BaseException as error:  # noqa: BLE001 - any exception is a reply, even SystemExit
            send(b"X" + describe(error).encode(errors="replace"))
    os._exit(0)


# --- plain data -----------------------------------------------------------------------------------------------------


class WireError(ValueError):
    """A value is not plain data, or bytes do not encode plain data."""


def pack(value: Any, depth: int = 0) -> bytes:
    """Return the bytes of a value. A subclass of a builtin is sent as that builtin. Raise WireError."""
    if depth > DEPTH:
        raise WireError(f"nested deeper than {DEPTH}")
    if value is None or value is True or value is False:
        return b"N" if value is None else b"T" if value is True else b"F"
    kind: Any = type(value)
    if kind not in TYPES:
        kind = next((each for each in TYPES if isinstance(value, each)), kind)
    if kind is int:
        number = int.__index__(value)
        return _long(b"I", number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True))
    if kind is float:
        return _long(b"D", struct.pack(">d", value))
    if kind is complex:
        return _long(b"C", struct.pack(">dd", value.real, value.imag))
    if kind is str:
        return _long(b"S", str.encode(value, "utf-8", "surrogatepass"))
    if kind is bytes or kind is bytearray:
        return _long(b"B", bytes(value))
    if kind is dict:
        items = list(dict.items(value))
        parts = [pack(part, depth + 1) for item in items for part in item]
        return b"".join([b"M", len(items).to_bytes(4, "big"), *parts])
    if kind in SEQUENCES:
        items = list(kind.__iter__(value))
        head = SEQUENCES[kind].encode() + len(items).to_bytes(4, "big")
        return b"".join([head, *(pack(item, depth + 1) for item in items)])
    raise WireError(f"not plain data: {kind.__name__}")


def _long(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(4, "big") + data


def unpack(
    data: bytes, make_set: Callable[..., Any] | None = None, make_dict: Callable[..., Any] = dict, depth: int = 0
) -> Any:
    """Return the value that `data` encodes. Raise WireError.

    `make_set(kind, items)` and `make_dict(pairs)` replace the construction of sets and dicts, which can take quadratic
    time for hostile items.
    """
    value, end = _unpack(data, 0, depth, make_set or (lambda kind, items: kind(items)), make_dict)
    if end != len(data):
        raise WireError("bytes after the value")
    return value


def _unpack(
    data: bytes, at: int, depth: int, make_set: Callable[..., Any], make_dict: Callable[..., Any]
) -> tuple[Any, int]:
    tag = data[at : at + 1]
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], at + 1
    start = at + 5
    size = int.from_bytes(data[at + 1 : start], "big")
    if depth > DEPTH or start > len(data) or size > len(data) - start:
        raise WireError("nested too deep, or cut off")
    name = tag.decode("latin-1")
    if name in LISTS or name == "M":
        items = []
        for _ in range(size * 2 if name == "M" else size):
            item, start = _unpack(data, start, depth + 1, make_set, make_dict)
            items.append(item)
        try:
            if name == "M":
                return make_dict(list(zip(items[::2], items[1::2], strict=True))), start
            return (items if name == "L" else tuple(items) if name == "U" else make_set(LISTS[name], items)), start
        except TypeError as error:  # a list in a set
            raise WireError(str(error)) from None
    end = start + size
    body = data[start:end]
    try:
        if name == "I":
            return int.from_bytes(body, "big", signed=True), end
        if name == "D":
            return struct.unpack(">d", body)[0], end
        if name == "C":
            return complex(*struct.unpack(">dd", body)), end
        if name == "S":
            return body.decode("utf-8", "surrogatepass"), end
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(str(error)) from None
    if name == "B":
        return bytes(body), end
    raise WireError(f"unknown tag {tag!r}")
