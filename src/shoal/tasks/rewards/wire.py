"""Plain data as bytes, across the wall of the sandbox: arguments in, return values out. No pickle, no objects, no code.

Invariant: what comes out of `unpack` is made of builtins alone, so nothing that a program overrides is ever called
outside; its size is bounded by the frame and its depth by DEPTH. This source also runs inside the sandbox
(`inside`), so it imports only what is warm there.
Left out: object identity, and everything that is not plain data; a generator or an object of your own is refused.

A value is a tag, then for all but N, T and F a length (4 bytes, big-endian), then so many bytes or values:
N none, T true, F false, I int (two's complement), D float, C complex, S text, B bytes, L list, U tuple, E set, Z
frozenset, M dict.
"""

import struct
from collections.abc import Callable
from typing import Any

DEPTH = 60
LISTS: dict[str, Any] = {"L": list, "U": tuple, "E": set, "Z": frozenset}
SEQUENCES: dict[Any, str] = {kind: tag for tag, kind in LISTS.items()}
TYPES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)


class WireError(ValueError):
    """Not plain data, or not the bytes of plain data."""


def pack(value: Any, depth: int = 0) -> bytes:
    """The bytes of a value. A subclass of a builtin crosses as that builtin. Raises WireError."""
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
        return b"".join(
            [b"M", len(items).to_bytes(4, "big"), *(pack(one, depth + 1) for item in items for one in item)]
        )
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
    """The value in `data`, all of it. Raises WireError.

    `make_set(kind, items)` and `make_dict(pairs)` replace sets and dicts: building one from hostile items can take
    quadratic time.
    """
    value, end = _unpack(data, 0, depth, make_set or _set, make_dict)
    if end != len(data):
        raise WireError("bytes after the value")
    return value


def _set(kind: Any, items: list[Any]) -> Any:
    return kind(items)


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
