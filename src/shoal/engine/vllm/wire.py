"""Frames between the worker and vLLM's process: a JSON header and tensors as safetensors, over one socket.

    4 bytes  length of the header      8 bytes  length of the tensors      header, then tensors; big-endian

Invariant: nothing is unpickled, and nothing longer than the bounds is read.
Called by `client` and `server`. It imports only what both environments have.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

LENGTHS = struct.Struct("!IQ")
MOST_HEADER_BYTES = 256 << 20
MOST_TENSOR_BYTES = 8 << 30


class WireError(Exception):
    """The other end sent no frame, or closed the connection."""


class ClosedError(WireError):
    """The other end is gone."""


def send(to: socket.socket, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Send one frame. Raises ClosedError."""
    text, data = json.dumps(header).encode(), save(dict(tensors)) if tensors else b""
    try:
        to.sendall(LENGTHS.pack(len(text), len(data)) + text + data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ClosedError("the other end is gone") from error


def receive(source: socket.socket) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The next frame. Raises ClosedError, WireError; TimeoutError after the socket's timeout without a byte."""
    header_bytes, tensor_bytes = LENGTHS.unpack(_exactly(source, LENGTHS.size))
    if header_bytes > MOST_HEADER_BYTES or tensor_bytes > MOST_TENSOR_BYTES:
        raise WireError(f"a frame of {header_bytes} and {tensor_bytes} bytes is larger than any that is sent")
    header = json.loads(_exactly(source, header_bytes))
    if not isinstance(header, dict):
        raise WireError("a frame whose header is no JSON object")
    return header, load(bytes(_exactly(source, tensor_bytes))) if tensor_bytes else {}


def _exactly(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        try:
            got = source.recv_into(view[have:])
        except ConnectionResetError as error:
            raise ClosedError("the other end is gone") from error
        if not got:
            raise ClosedError("the other end is gone")
        have += got
    return data
