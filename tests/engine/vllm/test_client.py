"""What the engine does when its child process is absent, unfit, silent or dead. Here the child is a few lines of Python."""

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from shoal.engine.protocol import Sampling
from shoal.engine.vllm import client, wire
from shoal.engine.vllm.client import VllmEngine, VllmError
from shoal.errors import ShoalError

HELLO = {"is": "hello", "versions": {"vllm": "0"}}
SAMPLING = Sampling(1.0, 8, (1,))


def child(tmp_path: Path, *says: dict[str, object] | bytes, then: str = "") -> str:
    """A program that takes any arguments, says these frames, or bytes, on the socket and does `then`."""
    path = tmp_path / "python"
    path.write_text(
        dedent(f"""\
        #!{sys.executable} -S
        import json, os, socket, struct, sys, time
        to = socket.socket(fileno=int(sys.argv[-1]))
        for frame in {list(says)!r}:
            text = json.dumps(frame).encode() if isinstance(frame, dict) else b""
            to.sendall(struct.pack("!IQ", len(text), 0) + text if text else frame)
        {then}
        """)
    )
    path.chmod(0o700)
    return str(path)


def test_an_environment_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(client.PYTHON, raising=False)
    with pytest.raises(ShoalError, match="SHOAL_VLLM_PYTHON names nothing: set it"):
        VllmEngine("float32")
    monkeypatch.setenv(client.PYTHON, "/nowhere/python")
    with pytest.raises(ShoalError, match="names /nowhere/python"):
        VllmEngine("float32")


def test_an_environment_without_vllm_is_named() -> None:
    with pytest.raises(ShoalError, match=r"has no vLLM, and Shoal drives vLLM 0\.32\.0: install"):
        VllmEngine("float32", python=sys.executable)


def test_a_childs_own_words_are_passed_on(tmp_path: Path) -> None:
    failed = {"is": "failed", "why": "out of memory"}
    engine = VllmEngine("float32", python=child(tmp_path, HELLO, failed, then="to.recv(1)"))
    with pytest.raises(VllmError, match="out of memory"):
        engine.load(tmp_path)
    assert engine.process.returncode is not None, "it is ended"
    assert not Path(engine.path.name).exists(), "nothing is left behind"


def test_a_first_version_may_be_dropped_while_vllm_starts(tmp_path: Path) -> None:
    version = tmp_path / "v000000"
    version.mkdir()
    (version / "weights").write_text("w")
    look = f"""
        import shutil, pathlib
        frame = json.loads(to.recv(struct.unpack("!IQ", to.recv(12))[0]))
        shutil.rmtree({str(version)!r})
        assert (pathlib.Path(frame["folder"]) / "weights").read_text() == "w"
        text = b'{{"is": "loaded"}}'
        to.sendall(struct.pack("!IQ", len(text), 0) + text)
        to.recv(1)"""
    engine = VllmEngine("float32", python=child(tmp_path, HELLO, then=look))
    engine.load(version)
    assert not (Path(engine.path.name) / "first").exists(), "it is not kept"
    engine.close()


def test_calls_of_several_threads_share_the_child(tmp_path: Path) -> None:
    """Whichever thread reads an answer, it goes to the call that asked."""
    here, there = socket.socketpair()
    for number, tokens in ((1, [3, 1]), (0, [1])):
        tensors = {"logprobs": torch.zeros(len(tokens)), "hidden": torch.zeros(len(tokens), 8, dtype=torch.bfloat16)}
        wire.send(there, {"is": "done", "id": f"shoal-{number}", "tokens": tokens}, tensors)
    answers = here.recv(1 << 16)
    then = f"""
        asked = b""
        while asked.count(b'"add"') < 2: asked += to.recv(1 << 20)
        to.sendall({answers!r})
        to.recv(1)"""
    engine = VllmEngine("float32", python=child(tmp_path, HELLO, {"is": "loaded"}, then=then))
    engine.load(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(engine.generate, [[2]], [[1]], SAMPLING)
        while not engine.waiting:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="would change their weights"):
            engine.load(tmp_path)
        second = threads.submit(engine.generate, [[2, 2]], [[1]], SAMPLING)
        assert [call.result(30)[0][0].tokens for call in (first, second)] == [[1], [3, 1]]
    engine.close()
