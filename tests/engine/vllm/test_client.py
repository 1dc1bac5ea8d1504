"""A missing, unfit, silent or dead child process is reported. No call hangs, no process or file of the child remains,
and no completion with a fault is returned.

In these tests the child is a few lines of Python.
"""

import os
import select
import socket
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from shoal.engine.protocol import Sampling
from shoal.engine.vllm import client, wire
from shoal.engine.vllm.client import VllmEngine, VllmError
from shoal.errors import ShoalError

SAMPLING = Sampling(1.0, 4, (1,))
HELLO = {"is": "hello", "versions": {"vllm": "0"}}
LOADED = {"is": "loaded"}
UNTIL_CLOSED = "while to.recv(1 << 20): pass"
UNTIL_REQUEST = """while b'"add"' not in to.recv(1 << 20): pass
        """
UNTIL_TWO_REQUESTS = """requests = b""
        while requests.count(b'"add"') < 2: requests += to.recv(1 << 20)
        """
SEND_ENVIRONMENT = f"""
        text = json.dumps({{"is": "hello", "versions": dict(os.environ)}}).encode()
        to.sendall(struct.pack("!IQ", len(text), 0) + text)
        {UNTIL_CLOSED}"""


def child(tmp_path: Path, *frames: dict[str, object] | bytes, then: str = "") -> str:
    """Write a program that sends these frames or bytes on the socket and then runs `then`."""
    path = tmp_path / "python"
    path.write_text(
        dedent(f"""\
        #!{sys.executable} -S
        import json, os, pathlib, shutil, socket, struct, sys, time
        to = socket.socket(fileno=int(sys.argv[-1]))
        for frame in {list(frames)!r}:
            text = json.dumps(frame).encode() if isinstance(frame, dict) else b""
            to.sendall(struct.pack("!IQ", len(text), 0) + text if text else frame)
        {then}
        """)
    )
    path.chmod(0o700)
    return str(path)


def started(tmp_path: Path, *frames: dict[str, object] | bytes, then: str = UNTIL_CLOSED) -> VllmEngine:
    return VllmEngine("float32", python=child(tmp_path, HELLO, *frames, then=then))


def loaded(tmp_path: Path, *frames: dict[str, object] | bytes, then: str = UNTIL_CLOSED) -> VllmEngine:
    engine = started(tmp_path, LOADED, *frames, then=then)
    engine.load(tmp_path)
    return engine


def generate(engine: VllmEngine, prompt_tokens: int = 1) -> list[int]:
    return engine.generate([[2] * prompt_tokens], [[1]], SAMPLING)[0][0].tokens


def done(number: int, tokens: list[int]) -> bytes:
    """Return the bytes of a finished request's frame."""
    here, there = socket.socketpair()
    tensors = {"logprobs": torch.zeros(len(tokens)), "hidden": torch.zeros(len(tokens), 8, dtype=torch.bfloat16)}
    wire.send(there, {"is": "done", "id": f"shoal-{number}", "tokens": tokens}, tensors)
    return here.recv(1 << 16)


@pytest.mark.parametrize(
    ("python", "why"), [("", "is not set"), ("/nowhere/python", "names /nowhere/python, which is not a program")]
)
def test_the_error_for_a_missing_environment_names_it(monkeypatch: pytest.MonkeyPatch, python: str, why: str) -> None:
    monkeypatch.setenv(client.PYTHON, python)
    with pytest.raises(ShoalError, match=f"SHOAL_VLLM_PYTHON {why}: set it"):
        VllmEngine("float32")


def test_the_error_for_an_environment_without_vllm_names_the_version_needed() -> None:
    with pytest.raises(ShoalError, match=r"has no vLLM, but Shoal needs vLLM 0\.32\.0: install"):
        VllmEngine("float32", python=sys.executable)


def test_a_failure_to_load_is_reported_and_ends_the_child(tmp_path: Path) -> None:
    engine = started(tmp_path, {"is": "failed", "why": "out of memory"})
    with pytest.raises(VllmError, match="out of memory"):
        engine.load(tmp_path)
    assert engine.process.returncode is not None and not Path(engine.folder.name).exists()


def test_a_child_that_dies_at_once_or_has_no_weights_yet_causes_an_error(tmp_path: Path) -> None:
    with pytest.raises(VllmError, match=r"exit status 3\): the other end closed"):
        VllmEngine("float32", python=child(tmp_path, then="to.close(); sys.exit(3)"))
    engine = started(tmp_path)
    with pytest.raises(RuntimeError, match="call load"):
        generate(engine)
    engine.close()


@pytest.mark.parametrize(
    ("frames", "then", "message"),
    [
        ([], UNTIL_REQUEST + "os.kill(os.getpid(), 9)", r"exit status -9\): the other end closed"),
        ([], UNTIL_REQUEST + "to.sendall(bytes(5)); os._exit(4)", r"exit status 4\): the other end closed"),
        ([{"is": "done", "id": "shoal-7"}], UNTIL_CLOSED, "unexpected 'done' with id 'shoal-7'"),
        ([{"is": "done", "id": ["shoal-0"]}], UNTIL_CLOSED, "unexpected 'done'"),
        ([{"is": "done", "id": "shoal-0"}], UNTIL_CLOSED, "tokens are not token ids"),
        ([LOADED], UNTIL_CLOSED, "unexpected 'loaded' with id None"),
        ([{}], UNTIL_CLOSED, "a frame of kind None"),
    ],
    ids=["killed", "cut", "another's id", "no id", "no tokens", "out of turn", "empty"],
)
def test_a_wrong_frame_ends_the_child(tmp_path: Path, frames: list[dict[str, object]], then: str, message: str) -> None:
    engine = loaded(tmp_path, *frames, then=then)
    with pytest.raises(VllmError, match=message):
        generate(engine)
    assert engine.process.returncode is not None and not Path(engine.folder.name).exists()
    with pytest.raises(VllmError, match="it ended"):
        generate(engine)


@pytest.mark.parametrize(
    ("then", "prompt_tokens", "message"),
    [
        (UNTIL_CLOSED, 1, r"sent nothing for 0\.2 s"),
        (UNTIL_REQUEST + "while True: to.sendall(bytes(1)); time.sleep(0.02)", 1, r"sent nothing for 0\.2 s"),
        ("time.sleep(600)", 1_000_000, r"read nothing for 0\.2 s"),
    ],
    ids=["silent", "a byte at a time", "deaf"],
)
def test_no_wait_is_longer_than_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, prompt_tokens: int, message: str
) -> None:
    monkeypatch.setattr(client, "SILENT_S", 0.2)
    monkeypatch.setattr(client, "END_S", 0.05)
    with pytest.raises(VllmError, match=message):
        generate(loaded(tmp_path, then=then), prompt_tokens)


def test_processes_that_a_hanging_child_started_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "END_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # its reader sees the end of file once every process with the write end has ended
    engine = loaded(tmp_path, then=f"os.open({str(pipe)!r}, os.O_WRONLY); os.fork(); time.sleep(600)")
    with pipe.open("rb") as reader:
        engine.close()
        assert engine.process.returncode == -9
        assert select.select([reader], [], [], 5.0)[0], "a process still runs"


def test_the_first_version_may_be_deleted_while_vllm_starts(tmp_path: Path) -> None:
    version = tmp_path / "v000000"
    version.mkdir()
    (version / "weights").write_text("w")
    then = f"""
        frame = json.loads(to.recv(struct.unpack("!IQ", to.recv(12))[0]))
        shutil.rmtree({str(version)!r})
        assert (pathlib.Path(frame["folder"]) / "weights").read_text() == "w"
        text = b'{{"is": "loaded"}}'
        to.sendall(struct.pack("!IQ", len(text), 0) + text)
        {UNTIL_CLOSED}"""
    engine = started(tmp_path, then=then)
    engine.load(version)
    assert not (Path(engine.folder.name) / "first").exists(), "the copy was not removed"
    engine.close()


def test_weights_of_another_user_are_copied_because_they_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")  # as with fs.protected_hardlinks

    monkeypatch.setattr(os, "link", forbidden)
    (tmp_path / "weights").write_text("w")
    client._link(str(tmp_path / "weights"), str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_text() == "w"
    with pytest.raises(FileNotFoundError):
        client._link(str(tmp_path / "absent"), str(tmp_path / "other"))


def test_calls_of_several_threads_share_the_child(tmp_path: Path) -> None:
    """Each frame reaches the call to which it belongs, even if the other call's thread reads it."""
    frames = done(1, [3, 1]) + done(0, [1])
    engine = loaded(tmp_path, then=f"{UNTIL_TWO_REQUESTS}to.sendall({frames!r}); to.recv(1)")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(generate, engine)
        while not engine.waiting:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="would change the weights"):
            engine.load(tmp_path)
        second = threads.submit(generate, engine, 2)
        assert [call.result(30) for call in (first, second)] == [[1], [3, 1]]
    engine.close()


def test_an_error_ends_the_calls_of_all_threads(tmp_path: Path) -> None:
    """One thread reads for both. The other thread must not wait forever when that one gets the error."""
    engine = loaded(tmp_path, then=UNTIL_TWO_REQUESTS + "os._exit(4)")
    with ThreadPoolExecutor(2) as threads:
        for call in [threads.submit(generate, engine) for _ in range(2)]:
            with pytest.raises(VllmError, match=r"exit status 4\)"):
                call.result(30)
    assert not Path(engine.folder.name).exists()


def test_an_environments_error_leaves_no_requests_behind(tmp_path: Path) -> None:
    engine = loaded(tmp_path, done(0, [1]))

    def respond(*_: Any) -> list[int]:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        engine.generate([[2]], [[1]], SAMPLING, respond)
    assert not engine.waiting
    engine.close()


def test_only_its_own_user_may_write_where_the_child_works(tmp_path: Path) -> None:
    engine = VllmEngine("float32", python=child(tmp_path, then=SEND_ENVIRONMENT))
    folder = Path(engine.versions["TMPDIR"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
    assert engine.versions["PYTHONPATH"] == str(folder) == engine.folder.name
    assert engine.versions["GLOO_SOCKET_IFNAME"].startswith("lo"), "PyTorch listens on the network"
    engine.close()
    assert not folder.exists()


GOOD: dict[str, Any] = {
    "tokens": [2, 3, 1],
    "logprobs": torch.zeros(3),
    "hidden": torch.zeros(3, 8, dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"tokens": "231"}, "not token ids"),
        ({"tokens": [2, True, 1]}, "not token ids"),
        ({"tokens": [2, -3, 1]}, "not token ids"),
        ({"tokens": []}, "ends neither"),
        ({"tokens": [2, 3, 4]}, "ends neither"),
        ({"tokens": [2, 1, 1]}, "ends neither"),
        ({"tokens": [2, 3, 4, 5, 1]}, "ends neither"),
        ({"logprobs": torch.zeros(2)}, "no matching logprobs"),
        ({"logprobs": torch.zeros(3, dtype=torch.float64)}, "no matching logprobs"),
        ({"hidden": torch.zeros(3, 8)}, "no matching hidden"),
        ({"hidden": torch.zeros(24, dtype=torch.bfloat16)}, "no matching hidden"),
        ({"logprobs": torch.full((3,), torch.nan)}, "not finite"),
        ({"hidden": torch.full((3, 8), torch.inf, dtype=torch.bfloat16)}, "not finite"),
    ],
)
def test_a_completion_that_a_validator_would_call_a_lie_is_refused(change: dict[str, Any], message: str) -> None:
    completion = GOOD | change
    fault = client._fault(completion.pop("tokens"), completion, SAMPLING, 4)
    assert message in fault and bool(message) == bool(fault)
