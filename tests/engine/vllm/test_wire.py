"""Frames arrive as they were sent, and nothing else is read."""

import json
import socket
import struct
import tracemalloc

import pytest
import torch

from shoal.engine.vllm.wire import LENGTHS, MOST_TENSOR_BYTES, ClosedError, FrameError, receive, send

ODD = b'{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,0]}}'


def test_a_frame_arrives_as_it_was_sent() -> None:
    here, there = socket.socketpair()
    hidden_TH = torch.randn(3, 8).bfloat16()
    send(here, {"is": "done", "tokens": [1, 2, 3]}, {"hidden": hidden_TH})
    send(here, {"is": "working"})
    frame, tensors = receive(there)
    assert frame == {"is": "done", "tokens": [1, 2, 3]} and torch.equal(tensors["hidden"], hidden_TH)
    assert receive(there) == ({"is": "working"}, {})


def test_a_cut_frame_and_a_closed_socket_are_told() -> None:
    here, there = socket.socketpair()
    here.sendall(LENGTHS.pack(10, 0) + b"{")
    here.close()
    with pytest.raises(ClosedError, match="gone"):
        receive(there)
    with pytest.raises(ClosedError, match="gone"):
        send(there, {"is": "late"})


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(LENGTHS.pack(2, MOST_TENSOR_BYTES + 1) + b"{}", id="too large"),
        pytest.param(LENGTHS.pack(2, 0) + json.dumps([]).encode(), id="no object"),
        pytest.param(LENGTHS.pack(2, 0) + b"{]", id="no JSON"),
        pytest.param(LENGTHS.pack(2, 0) + b"\xff{", id="no text"),
        pytest.param(LENGTHS.pack(100_000, 0) + b"[" * 100_000, id="deep"),
        pytest.param(LENGTHS.pack(2, 8) + b"{}" + bytes(8), id="no tensors"),
        pytest.param(LENGTHS.pack(2, len(ODD) + 8) + b"{}" + struct.pack("<Q", len(ODD)) + ODD, id="odd tensors"),
    ],
)
def test_what_is_no_frame_is_refused(sent: bytes) -> None:
    here, there = socket.socketpair()
    here.sendall(sent)
    with pytest.raises(FrameError):
        receive(there)


def test_a_frame_that_claims_much_takes_no_memory_and_no_more_than_its_time() -> None:
    here, there = socket.socketpair()
    here.sendall(LENGTHS.pack(2, MOST_TENSOR_BYTES) + b"{}" + bytes(100))
    tracemalloc.start()
    with pytest.raises(TimeoutError):
        receive(there, 0.05)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 16 << 20
