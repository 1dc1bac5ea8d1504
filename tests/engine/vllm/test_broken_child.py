"""A child that breaks in mid-work ends the engine with a message: nothing hangs, is left behind, or gets signed."""

import os
import queue
import select
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine.protocol import Sampling
from shoal.engine.vllm import client, server, wire
from shoal.engine.vllm.client import VllmEngine, VllmError

from .test_client import HELLO, child

SAMPLING = Sampling(1.0, 4, (1,))
LOADED = {"is": "loaded"}
UNTIL_CLOSED = "while to.recv(1 << 20): pass"
UNTIL_ASKED = """while b'"add"' not in to.recv(1 << 20): pass
        """


def loaded(tmp_path: Path, *says: dict[str, object] | bytes, then: str = UNTIL_CLOSED) -> VllmEngine:
    engine = VllmEngine("float32", python=child(tmp_path, HELLO, LOADED, *says, then=then))
    engine.load(tmp_path)
    return engine


def generate(engine: VllmEngine, prompt_tokens: int = 1) -> None:
    engine.generate([[2] * prompt_tokens], [[1]], SAMPLING)


@pytest.mark.parametrize(
    ("says", "then", "told"),
    [
        ([], UNTIL_ASKED + "os.kill(os.getpid(), 9)", r"\(status -9\): the other end is gone"),
        ([], UNTIL_ASKED + "to.sendall(bytes(5)); os._exit(4)", r"\(status 4\): the other end is gone"),
        ([{"is": "done", "id": "shoal-7"}], UNTIL_CLOSED, "said 'done' of 'shoal-7', which it was not asked for"),
        ([{"is": "done", "id": ["shoal-0"]}], UNTIL_CLOSED, "not asked for"),
        ([{"is": "done", "id": "shoal-0"}], UNTIL_CLOSED, "tokens are no numbers"),
        ([LOADED], UNTIL_CLOSED, "said 'loaded' of None"),
        ([{}], UNTIL_CLOSED, "a frame that says None"),
    ],
    ids=["killed", "cut", "of another", "id", "empty", "out of turn", "nothing"],
)
def test_what_it_says_wrongly_ends_it(tmp_path: Path, says: list[dict[str, object]], then: str, told: str) -> None:
    engine = loaded(tmp_path, *says, then=then)
    with pytest.raises(VllmError, match=told):
        generate(engine)
    assert engine.process.returncode is not None and not Path(engine.path.name).exists()
    with pytest.raises(VllmError, match="it ended"):
        generate(engine)


@pytest.mark.parametrize(
    ("then", "prompt_tokens", "told"),
    [
        (UNTIL_CLOSED, 1, r"said nothing for 0\.2 s"),
        (UNTIL_ASKED + "while True: to.sendall(bytes(1)); time.sleep(0.02)", 1, r"said nothing for 0\.2 s"),
        ("time.sleep(600)", 1_000_000, r"did not listen for 0\.2 s"),
    ],
    ids=["silent", "a byte at a time", "deaf"],
)
def test_no_wait_is_longer_than_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, prompt_tokens: int, told: str
) -> None:
    monkeypatch.setattr(client, "SILENT_S", 0.2)
    monkeypatch.setattr(client, "END_S", 0.05)
    with pytest.raises(VllmError, match=told):
        generate(loaded(tmp_path, then=then), prompt_tokens)


def test_a_child_that_dies_at_once_and_one_without_weights_are_told(tmp_path: Path) -> None:
    with pytest.raises(VllmError, match=r"\(status 3\): the other end is gone"):
        VllmEngine("float32", python=child(tmp_path, then="to.close(); sys.exit(3)"))
    engine = VllmEngine("float32", python=child(tmp_path, HELLO, then="to.recv(1)"))
    with pytest.raises(RuntimeError, match="call load"):
        generate(engine)
    engine.close()


def test_what_a_hanging_child_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "END_S", 0.05)
    started = tmp_path / "started"
    os.mkfifo(started)  # its reader sees the end when the last process that may write is gone
    then = f"os.open({str(started)!r}, os.O_WRONLY); os.fork(); time.sleep(600)"
    engine = loaded(tmp_path, then=then)
    with started.open("rb") as reader:
        engine.close()
        assert engine.process.returncode == -9
        assert select.select([reader], [], [], 5.0)[0], "something of it still runs"


def test_an_environments_error_leaves_no_requests_behind(tmp_path: Path) -> None:
    tensors = {"logprobs": torch.zeros(1), "hidden": torch.zeros(1, 8, dtype=torch.bfloat16)}
    here, there = socket.socketpair()
    wire.send(there, {"is": "done", "id": "shoal-0", "tokens": [1]}, tensors)
    engine = loaded(tmp_path, here.recv(1 << 16))

    def respond(*_: Any) -> list[int]:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        engine.generate([[2]], [[1]], SAMPLING, respond)
    assert not engine.waiting
    engine.close()


def test_what_breaks_it_ends_all_calls(tmp_path: Path) -> None:
    """One thread reads for both; the other one must not wait for ever."""
    until_both = """asked = b""
        while asked.count(b'"add"') < 2: asked += to.recv(1 << 20)
        """
    engine = loaded(tmp_path, then=until_both + "os._exit(4)")
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(generate, engine) for _ in range(2)]
        for call in calls:
            with pytest.raises(VllmError, match=r"\(status 4\)"):
                call.result(30)
    assert not Path(engine.path.name).exists()


def test_only_its_own_user_may_write_where_it_works(tmp_path: Path) -> None:
    engine = VllmEngine("float32", python=child(tmp_path, then=SAYS_WHERE))
    folder = Path(engine.versions["TMPDIR"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
    assert engine.versions["PYTHONPATH"] == str(folder) == engine.path.name
    assert engine.versions["GLOO_SOCKET_IFNAME"].startswith("lo"), "PyTorch's listeners are not on the network"
    engine.close()
    assert not folder.exists()


SAYS_WHERE = f"""
        text = json.dumps({{"is": "hello", "versions": dict(os.environ)}}).encode()
        to.sendall(struct.pack("!IQ", len(text), 0) + text)
        {UNTIL_CLOSED}"""


def test_weights_of_another_user_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")  # as with fs.protected_hardlinks

    monkeypatch.setattr(os, "link", forbidden)
    (tmp_path / "weights").write_text("w")
    client._link(str(tmp_path / "weights"), str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_text() == "w"
    with pytest.raises(FileNotFoundError):
        client._link(str(tmp_path / "absent"), str(tmp_path / "other"))


GOOD: dict[str, Any] = {
    "tokens": [2, 3, 1],
    "logprobs": torch.zeros(3),
    "hidden": torch.zeros(3, 8, dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"tokens": "231"}, "no numbers"),
        ({"tokens": [2, True, 1]}, "no numbers"),
        ({"tokens": [2, -3, 1]}, "no numbers"),
        ({"tokens": []}, "ends elsewhere"),
        ({"tokens": [2, 3, 4]}, "ends elsewhere"),
        ({"tokens": [2, 1, 1]}, "ends elsewhere"),
        ({"tokens": [2, 3, 4, 5, 1]}, "ends elsewhere"),
        ({"logprobs": torch.zeros(2)}, "without their logprobs"),
        ({"logprobs": torch.zeros(3, dtype=torch.float64)}, "without their logprobs"),
        ({"hidden": torch.zeros(3, 8)}, "without their hidden"),
        ({"hidden": torch.zeros(24, dtype=torch.bfloat16)}, "without their hidden"),
        ({"logprobs": torch.full((3,), torch.nan)}, "no numbers"),
        ({"hidden": torch.full((3, 8), torch.inf, dtype=torch.bfloat16)}, "no numbers"),
    ],
)
def test_no_completion_is_taken_that_a_validator_would_call_a_lie(change: dict[str, Any], told: str) -> None:
    made = GOOD | change
    fault = client._fault(made.pop("tokens"), made, SAMPLING, 4)
    assert told in fault and bool(told) == bool(fault)


def test_the_child_ends_in_the_middle_of_a_step_when_the_socket_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_S", 0.0)
    here, there = socket.socketpair()
    inbox: queue.Queue[Any] = queue.Queue()
    ended: list[bool] = []
    here.close()
    server._read(there, inbox, lambda: ended.append(True))
    assert ended and isinstance(inbox.get(), wire.ClosedError)


@pytest.mark.parametrize(("drawn", "working"), [([5, 9], 2), ([5, 5], 1), ([0, 0], 0)])
def test_steps_that_draw_nothing_are_silence(monkeypatch: pytest.MonkeyPatch, drawn: list[int], working: int) -> None:
    monkeypatch.setattr(server, "WORKING_S", -1.0)
    here, there = socket.socketpair()
    turning = server.Server(here)
    turning.llm = _Turning(drawn)
    for _ in drawn:
        turning.step()
    here.close()
    frames = list(iter(lambda: _frame(there), None))
    assert frames == [{"is": "working"}] * working


class _Turning:
    """A vLLM that steps and finishes nothing."""

    def __init__(self, drawn: list[int]) -> None:
        self.drawn = iter(drawn)
        self.llm_engine = self
        self.step: Callable[[], list[Any]] = list

    def collective_rpc(self, method: str) -> list[int]:
        assert method == "shoal_drawn"
        return [next(self.drawn)]


def _frame(source: socket.socket) -> dict[str, Any] | None:
    try:
        return wire.receive(source)[0]
    except wire.ClosedError:
        return None
