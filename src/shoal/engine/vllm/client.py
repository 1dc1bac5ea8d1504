"""The worker's side of the vLLM engine: `Engine`'s methods, over a socket to a child process in vLLM's own environment.

vLLM and Shoal pin different versions of libraries, so vLLM has its own environment; `SHOAL_VLLM_PYTHON` is the path of
its Python (docs/operate.md). The child imports only modules of Shoal whose dependencies are installed there. All
groups of all calls are in vLLM's scheduler at once. vLLM computes a shared prompt once where its prefix cache can. After
a task environment replies, the next turn is a new request, which joins while the others continue. Calls from several
threads share the socket: one thread reads for all of them.

Invariant: every wait has a deadline; the child ends with this process, at `close`, or at the first error. Every completion
is checked, because the worker signs it: a broken child must not make an honest worker look like a liar.
Left out: one vLLM for several workers.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.engine.protocol import Calls, Completion, Draft, Respond, Sampling
from shoal.engine.vllm import wire
from shoal.errors import ShoalError
from shoal.model.dtype import DtypeName

PYTHON = "SHOAL_VLLM_PYTHON"
NAME = "vllm"  # the engine's name in reports and in the headers of submissions
START_S = 600.0  # to load vLLM and a model
SILENT_S = 120.0  # the child reports once a second while it samples tokens; one step may take longer
END_S = 10.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # Gloo listens for peers, though there are none
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # refuse cloudpickle
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `extension` uses the interface of version 1
}


class VllmError(ShoalError):
    """vLLM's process failed. The message says why."""

    restart_helps = True


def _request(draft: Draft) -> dict[str, Any]:
    """Return the fields of the request for the draft's next turn."""
    done = len(draft.tokens)
    return {
        "prompt": [*draft.prompt, *draft.tokens],
        "seed": draft.seed,
        "first": done,
        "temperature": draft.sampling.temperature,
        "max_tokens": draft.sampling.max_tokens - done,
        "ends": list(draft.sampling.eos_ids),
    }


def _fault(tokens: Any, tensors: dict[str, Tensor], sampling: Sampling, max_tokens: int) -> str:
    """Describe what is wrong with a request's completion; "" if nothing is."""
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        return "its tokens are not token ids"
    count = len(tokens)
    ends = [token in sampling.eos_ids for token in tokens]
    if not 0 < count <= max_tokens or any(ends[:-1]) or not (ends[-1] or count == max_tokens):
        return f"it has {count} tokens, but ends neither at its first end token nor after {max_tokens} tokens"
    logprobs, hidden = tensors.get("logprobs"), tensors.get("hidden")
    if logprobs is None or logprobs.dtype != torch.float32 or logprobs.shape != (count,):
        return f"its {count} tokens have no matching logprobs"
    if hidden is None or hidden.dtype != torch.bfloat16 or hidden.ndim != 2 or len(hidden) != count:
        return f"its {count} tokens have no matching hidden states"
    if not (logprobs.isfinite().all() and hidden.isfinite().all()):
        return "its logprobs or hidden states are not finite"
    return ""


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if it is on another disk or belongs to another user."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copyfile(source, target)  # raises if the file cannot be read


class VllmEngine:
    """One child process. The first `load` starts vLLM in it; later ones replace its weights in place."""

    def __init__(self, dtype: DtypeName, threads: int = 0, python: str = "") -> None:
        """`python`: path of the Python in vLLM's environment; "": SHOAL_VLLM_PYTHON. `threads`: 0 lets vLLM choose.

        Raise ShoalError if vLLM is missing or has another version.
        """
        python = python or os.environ.get(PYTHON, "")
        if not python or shutil.which(python) is None:
            why = f"names {python}, which is not a program" if python else "is not set"
            raise ShoalError(f"{PYTHON} {why}: set it to the Python of an environment with vLLM (docs/operate.md)")
        self.dtype = dtype
        self.request_ids = itertools.count()
        self.waiting: dict[str, Draft] = {}  # by request id
        self._calls = Calls()  # its lock also guards `waiting`, and sending
        self._closing = threading.Lock()
        self.loaded = False
        self.incoming, child_end = socket.socketpair()
        self.outgoing = self.incoming.dup()  # each socket has its own timeout: one thread may send while another reads
        self.folder = tempfile.TemporaryDirectory(prefix="shoal-vllm-")
        # Only Shoal is on the child's path: packages installed beside it may not be the versions that vLLM needs.
        (Path(self.folder.name) / "shoal").symlink_to(Path(shoal.__file__).parent)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        # TMPDIR, where vLLM creates sockets and PyTorch writes compiled code, must not be writable by other users.
        environment |= ENVIRONMENT | {"PYTHONPATH": self.folder.name, "TMPDIR": self.folder.name}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        with child_end:
            self.process = subprocess.Popen(
                [python, "-P", "-m", "shoal.engine.vllm.server", self.folder.name, str(child_end.fileno())],
                env=environment,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.versions: dict[str, str] = self._expect("hello").get("versions", {})

    def load(self, folder: Path) -> None:
        """Load or replace the weights. Raise RuntimeError during a `generate` call."""
        if self.waiting:
            raise RuntimeError("load() would change the weights during generate(): wait for it to return")
        if self.loaded:
            self._load(folder)
            return
        first = Path(self.folder.name) / "first"  # a copy, because the caller may delete the version while vLLM starts
        shutil.copytree(folder, first, copy_function=_link)
        self._load(first)
        shutil.rmtree(first)
        self.loaded = True

    def _load(self, folder: Path) -> None:
        self._send({"do": "load", "folder": str(folder.resolve()), "dtype": self.dtype})
        self._expect("loaded")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        if not self.loaded:
            raise RuntimeError("the engine has no weights yet: call load() first")
        drafts = [
            [Draft(prompt, g, number, seed, sampling, respond) for number, seed in enumerate(group)]
            for g, (prompt, group) in enumerate(zip(map(tuple, prompts), seeds, strict=True))
        ]
        own = [draft for group in drafts for draft in group]
        self._submit(own)
        self._calls.wait(own, self._read)
        return [[draft.completion() for draft in group] for group in drafts]

    def _read(self) -> None:
        """Process one frame, for whichever call it belongs to. After an error the next read fails too."""
        try:
            frame, tensors = self._receive(SILENT_S)
            if frame["is"] != "working":
                self._finish(frame, tensors)
        except BaseException:
            self.close()  # because requests are still in flight
            raise

    def _finish(self, frame: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Append a finished request's tokens to its draft, and submit the next turn if the environment replies."""
        draft = self.waiting.pop(str(frame.get("id")), None) if frame["is"] == "done" else None
        if draft is None:
            raise self._failure(f"it sent an unexpected {frame['is']!r} with id {frame.get('id')!r}")
        tokens: Any = frame.get("tokens")
        if fault := _fault(tokens, tensors, draft.sampling, draft.sampling.max_tokens - len(draft.tokens)):
            raise self._failure(f"it sent a bad completion: {fault}")
        draft.tokens += tokens
        draft.logprobs += tensors["logprobs"].tolist()
        draft.states.append(tensors["hidden"])
        reply = draft.reply()
        draft.tokens += reply
        if reply:
            self._submit([draft])
        else:
            draft.finish()

    def _submit(self, drafts: Sequence[Draft]) -> None:
        """Add the drafts' next turns to vLLM's scheduler."""
        with self._calls.changed:
            new = {f"shoal-{next(self.request_ids)}": draft for draft in drafts}
            self.waiting |= new
            self._send({"do": "add", "requests": [{"id": id, **_request(draft)} for id, draft in new.items()]})

    def close(self) -> None:
        """End the child process and everything it started. May be called repeatedly, and from several threads."""
        with self._closing:
            with contextlib.suppress(OSError):  # closed already
                self.incoming.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
            self.incoming.close()
            self.outgoing.close()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.folder.cleanup()

    def _send(self, frame: dict[str, Any]) -> None:
        if self.process.poll() is not None:
            raise self._failure("it ended")
        try:
            self.outgoing.settimeout(SILENT_S)
            wire.send(self.outgoing, frame)
        except TimeoutError:
            raise self._failure(f"it read nothing for {SILENT_S:g} s") from None
        except (wire.ClosedError, OSError):  # OSError: another thread closed the socket
            raise self._failure("it ended") from None

    def _expect(self, kind: str) -> dict[str, Any]:
        frame, _ = self._receive(START_S)
        if frame["is"] != kind:
            raise self._failure(f"it sent {frame['is']!r} instead of {kind!r}")
        return frame

    def _receive(self, within_s: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the next frame. Raise VllmError if vLLM failed or ended, or sent no valid frame in time."""
        try:
            frame, tensors = wire.receive(self.incoming, within_s)
        except TimeoutError:
            raise self._failure(f"it sent nothing for {within_s:g} s") from None
        except wire.FrameError as error:
            raise self._failure(str(error)) from None
        except OSError:  # another thread closed the socket
            raise self._failure("it ended") from None
        match frame.get("is"):
            case "unfit":
                self.close()
                raise ShoalError(str(frame.get("why")))
            case "failed":
                raise self._failure(str(frame.get("why")))
            case str():
                return frame, tensors
            case other:
                raise self._failure(f"it sent a frame of kind {other!r}")

    def _failure(self, why: str) -> VllmError:
        """End the child process and return the error to raise."""
        self.close()
        status = self.process.returncode
        return VllmError(f"vLLM's process failed (exit status {status}): {why}; see its messages above")
