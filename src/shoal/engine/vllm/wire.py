"""Frames between the worker and vLLM's process: a JSON header and tensors as safetensors, over one socket.

    4 bytes  length of the header      8 bytes  length of the tensors      header, then tensors; big-endian

Invariant: nothing is unpickled, nothing longer than the bounds is read, and memory is taken as bytes arrive, not as a frame
claims. It imports only what both environments have.
"""

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

LENGTHS = struct.Struct("!IQ")
MOST_HEADER_BYTES = 256 << 20
MOST_TENSOR_BYTES = 8 << 30
PIECE_BYTES = 1 << 20


class FrameError(Exception):
    """The other end sent no frame, or closed the connection."""


class ClosedError(FrameError):
    """The other end is gone."""


def send(to: socket.socket, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Send one frame. Raise ClosedError; TimeoutError, if the socket has a timeout, within which all must be sent."""
    text, data = json.dumps(header).encode(), save(dict(tensors)) if tensors else b""
    try:
        to.sendall(LENGTHS.pack(len(text), len(data)) + text + data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ClosedError("the other end is gone") from error


def receive(source: socket.socket, within_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The next frame, whole within `within_s`. Raise ClosedError, FrameError, TimeoutError."""
    until_s = None if within_s is None else time.monotonic() + within_s
    header_bytes, tensor_bytes = LENGTHS.unpack(_exactly(source, LENGTHS.size, until_s))
    if header_bytes > MOST_HEADER_BYTES or tensor_bytes > MOST_TENSOR_BYTES:
        raise FrameError(f"a frame of {header_bytes} and {tensor_bytes} bytes is larger than any that is sent")
    try:
        header = json.loads(_exactly(source, header_bytes, until_s))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame whose header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("a frame whose header is no JSON object")
    if not tensor_bytes:
        return header, {}
    data = bytes(_exactly(source, tensor_bytes, until_s))
    try:
        return header, load(data)
    except Exception as error:  # the library has no one error for files that it cannot read
        raise FrameError(f"a frame whose tensors cannot be read: {type(error).__name__}: {error}") from error


def _exactly(source: socket.socket, size: int, until_s: float | None) -> bytearray:
    data = bytearray()
    while len(data) < size:
        if until_s is not None:
            source.settimeout(max(until_s - time.monotonic(), 1e-3))
        try:
            piece = source.recv(min(size - len(data), PIECE_BYTES))
        except ConnectionResetError as error:
            raise ClosedError("the other end is gone") from error
        if not piece:
            raise ClosedError("the other end is gone")
        data += piece
    return data
