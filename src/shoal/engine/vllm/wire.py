"""Frames between a worker and its vLLM process: a JSON header and tensors as safetensors, over one socket.

    4 bytes  length of the header      8 bytes  length of the tensors      header, then tensors; big-endian

Invariant: nothing is unpickled, and nothing longer than the bounds is read. Memory is allocated as bytes arrive, whatever
length a frame claims. This module imports only packages that both environments have.
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
MAX_HEADER_BYTES = 256 << 20
MAX_TENSOR_BYTES = 8 << 30
PIECE_BYTES = 1 << 20


class FrameError(Exception):
    """The peer sent something other than a frame, or closed the connection."""


class ClosedError(FrameError):
    """The peer closed the connection."""


def send(connection: socket.socket, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Send one frame. Raise ClosedError, or TimeoutError after the socket's timeout."""
    text, data = json.dumps(header).encode(), save(dict(tensors)) if tensors else b""
    try:
        connection.sendall(LENGTHS.pack(len(text), len(data)) + text + data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ClosedError("the other end closed the connection") from error


def receive(connection: socket.socket, within_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the next frame, of which every byte must arrive within `within_s`.

    Raise ClosedError, FrameError or TimeoutError.
    """
    deadline_s = None if within_s is None else time.monotonic() + within_s
    header_bytes, tensor_bytes = LENGTHS.unpack(_read(connection, LENGTHS.size, deadline_s))
    if header_bytes > MAX_HEADER_BYTES or tensor_bytes > MAX_TENSOR_BYTES:
        raise FrameError(f"a frame's header ({header_bytes} bytes) or tensors ({tensor_bytes} bytes) are too large")
    try:
        header = json.loads(_read(connection, header_bytes, deadline_s))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("a frame's header is not a JSON object")
    if not tensor_bytes:
        return header, {}
    data = bytes(_read(connection, tensor_bytes, deadline_s))
    try:
        return header, load(data)
    except Exception as error:  # safetensors has no common error for unreadable files
        raise FrameError(f"a frame's tensors cannot be read: {type(error).__name__}: {error}") from error


def _read(connection: socket.socket, size: int, deadline_s: float | None) -> bytearray:
    data = bytearray()
    while len(data) < size:
        if deadline_s is not None:
            connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        try:
            piece = connection.recv(min(size - len(data), PIECE_BYTES))
        except ConnectionResetError as error:
            raise ClosedError("the other end closed the connection") from error
        if not piece:
            raise ClosedError("the other end closed the connection")
        data += piece
    return data
