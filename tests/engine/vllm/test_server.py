"""A frame arrives as it was sent, and anything else is an error. The server ends when its socket closes.

While the server samples tokens, it reports that it is busy.
"""

import json
import queue
import socket
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.engine.vllm import server
from shoal.engine.vllm.wire import LENGTHS, MAX_TENSOR_BYTES, ClosedError, FrameError, receive, send

ODD = b'{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,0]}}'


def test_a_frame_arrives_as_it_was_sent() -> None:
    here, there = socket.socketpair()
    hidden_TH = torch.randn(3, 8).bfloat16()
    send(here, {"is": "done", "tokens": [1, 2, 3]}, {"hidden": hidden_TH})
    send(here, {"is": "working"})
    frame, tensors = receive(there)
    assert frame == {"is": "done", "tokens": [1, 2, 3]} and torch.equal(tensors["hidden"], hidden_TH)
    assert receive(there) == ({"is": "working"}, {})


def test_a_cut_frame_and_a_closed_socket_are_errors() -> None:
    here, there = socket.socketpair()
    here.sendall(LENGTHS.pack(10, 0) + b"{")
    here.close()
    with pytest.raises(ClosedError):
        receive(there)
    with pytest.raises(ClosedError):
        send(there, {"is": "late"})


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(LENGTHS.pack(2, MAX_TENSOR_BYTES + 1) + b"{}", id="too large"),
        pytest.param(LENGTHS.pack(2, 0) + json.dumps([]).encode(), id="no object"),
        pytest.param(LENGTHS.pack(2, 0) + b"{]", id="no JSON"),
        pytest.param(LENGTHS.pack(2, 0) + b"\xff{", id="no text"),
        pytest.param(LENGTHS.pack(100_000, 0) + b"[" * 100_000, id="deep"),
        pytest.param(LENGTHS.pack(2, 8) + b"{}" + bytes(8), id="no tensors"),
        pytest.param(LENGTHS.pack(2, len(ODD) + 8) + b"{}" + struct.pack("<Q", len(ODD)) + ODD, id="odd tensors"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(sent: bytes) -> None:
    here, there = socket.socketpair()
    here.sendall(sent)
    with pytest.raises(FrameError):
        receive(there)


def test_a_frame_that_claims_to_be_large_takes_no_memory_and_times_out_at_its_deadline() -> None:
    here, there = socket.socketpair()
    here.sendall(LENGTHS.pack(2, MAX_TENSOR_BYTES) + b"{}" + bytes(100))
    tracemalloc.start()
    with pytest.raises(TimeoutError):
        receive(there, 0.05)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_the_server_ends_during_a_step_when_the_socket_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_S", 0.0)
    here, there = socket.socketpair()
    inbox: queue.Queue[Any] = queue.Queue()
    ended: list[bool] = []
    here.close()
    server._read(there, inbox, lambda: ended.append(True))
    assert ended and isinstance(inbox.get(), ClosedError)


class Stepping:
    """A vLLM whose steps finish no request."""

    def __init__(self, sampled: list[int]) -> None:
        self.sampled = iter(sampled)
        self.llm_engine = self
        self.step: Callable[[], list[Any]] = list

    def collective_rpc(self, method: str) -> list[int]:
        assert method == "shoal_sampled"
        return [next(self.sampled)]


@pytest.mark.parametrize(("sampled", "working"), [([5, 9], 2), ([5, 5], 1), ([0, 0], 0)])
def test_only_steps_that_sample_tokens_are_reported(
    monkeypatch: pytest.MonkeyPatch, sampled: list[int], working: int
) -> None:
    monkeypatch.setattr(server, "WORKING_S", -1.0)
    here, there = socket.socketpair()
    running = server.Server(here)
    running.llm = Stepping(sampled)
    for _ in sampled:
        running.step()
    here.close()
    assert [receive(there)[0] for _ in range(working)] == [{"is": "working"}] * working
    with pytest.raises(ClosedError):
        receive(there)
