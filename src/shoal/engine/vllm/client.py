"""The vLLM engine as a worker sees it: `Engine`'s methods, over a socket to a child process in vLLM's own environment.

vLLM's pins differ from Shoal's, so it gets an environment of its own, whose Python `SHOAL_VLLM_PYTHON` names
(docs/operate.md). The child imports a few of Shoal's modules, none of which needs more than that environment has.
All groups of all calls are in vLLM's scheduler at once; it computes a shared prompt once where its prefix cache can. After
an environment's answer, the next turn is a new request, which joins while the others continue. Calls from several threads
share the socket: one of them reads for all.

Invariant: every wait has a deadline; the child ends with this process, at `close`, or at the first error. What it says is
checked, because the worker signs it: a broken child must not make an honest worker look like a liar.
Left out: one scheduler for several workers.
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
NAME = "vllm"  # of the engine, in reports and in the headers of submissions
START_S = 600.0  # to load vLLM and a model
SILENT_S = 120.0  # while it draws tokens it says so every second; one step may take longer
END_S = 10.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # it listens for peers, of which vLLM has none
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # its cloudpickle stays off
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner, GPUs' default, has another interface than `extension` knows
}


class VllmError(ShoalError):
    """vLLM's process failed; the message says why."""

    restart_helps = True


def _request(draft: Draft) -> dict[str, Any]:
    """What vLLM is asked to write next."""
    done = len(draft.tokens)
    return {
        "prompt": [*draft.prompt, *draft.tokens],
        "seed": draft.seed,
        "first": done,
        "temperature": draft.sampling.temperature,
        "max_tokens": draft.sampling.max_tokens - done,
        "ends": list(draft.sampling.eos_ids),
    }


def _fault(tokens: Any, tensors: dict[str, Tensor], sampling: Sampling, room: int) -> str:
    """What is wrong with the completion of a request, in words; "" if nothing is. `room`: the most tokens."""
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        return "whose tokens are no numbers"
    ends = [token in sampling.eos_ids for token in tokens]
    if not 0 < len(tokens) <= room or any(ends[:-1]) or not (ends[-1] or len(tokens) == room):
        return f"of {len(tokens)} tokens that ends elsewhere than at its end token or after {room}"
    logprobs, hidden = tensors.get("logprobs"), tensors.get("hidden")
    if logprobs is None or logprobs.dtype != torch.float32 or logprobs.shape != (len(tokens),):
        return f"of {len(tokens)} tokens without their logprobs"
    if hidden is None or hidden.dtype != torch.bfloat16 or hidden.ndim != 2 or len(hidden) != len(tokens):
        return f"of {len(tokens)} tokens without their hidden states"
    if not (logprobs.isfinite().all() and hidden.isfinite().all()):
        return "with logprobs or hidden states that are no numbers"
    return ""


def _link(source: str, to: str) -> None:
    """A second name of the file; a copy where there can be none: another disk, or a file of another user."""
    try:
        os.link(Path(source).resolve(), to)
    except OSError:  # if it cannot be read at all, the copy says so
        shutil.copyfile(source, to)


class VllmEngine:
    """Holds one child process. The first `load` starts vLLM in it, later ones replace its weights in place."""

    def __init__(self, dtype: DtypeName, threads: int = 0, python: str = "") -> None:
        """`python`: of vLLM's environment; "": what SHOAL_VLLM_PYTHON says. `threads` 0: as many as vLLM takes.

        Raise ShoalError where there is no vLLM, or another release.
        """
        python = python or os.environ.get(PYTHON, "")
        if not python or shutil.which(python) is None:
            raise ShoalError(
                f"{PYTHON} names {python or 'nothing'}: set it to the Python of an environment with vLLM (docs/operate.md)"
            )
        self.dtype = dtype
        self.numbers = itertools.count()
        self.waiting: dict[str, Draft] = {}  # by request
        self._calls = Calls()  # its lock guards what waits, and that one thread sends
        self._closing = threading.Lock()
        self.loaded = False
        self.connection, theirs = socket.socketpair()
        self.outward = self.connection.dup()  # one thread may send while another reads: each with a timeout of its own
        self.path = tempfile.TemporaryDirectory(prefix="shoal-vllm-")
        # Shoal alone on the path: its neighbours may be the libraries whose releases differ.
        (Path(self.path.name) / "shoal").symlink_to(Path(shoal.__file__).parent)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        # vLLM puts what its processes meet by, and PyTorch what it compiles, into TMPDIR: no other user may write there.
        environment |= ENVIRONMENT | {"PYTHONPATH": self.path.name, "TMPDIR": self.path.name}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        with theirs:
            self.process = subprocess.Popen(
                [python, "-P", "-m", "shoal.engine.vllm.server", self.path.name, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.versions: dict[str, str] = self._expect("hello", START_S).get("versions", {})

    def load(self, folder: Path) -> None:
        """Raise RuntimeError while something is generated."""
        if self.waiting:
            raise RuntimeError("load() while completions are written would change their weights: wait for generate()")
        if self.loaded:
            self._load(folder)
            return
        first = Path(self.path.name) / "first"  # vLLM takes long to start; a cache may drop the version meanwhile
        shutil.copytree(folder, first, copy_function=_link)
        self._load(first)
        shutil.rmtree(first)
        self.loaded = True

    def _load(self, folder: Path) -> None:
        self._send({"do": "load", "folder": str(folder.resolve()), "dtype": self.dtype})
        self._expect("loaded", START_S)

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
        self._ask(own)
        self._calls.wait(own, self._read)
        return [[draft.completion() for draft in group] for group in drafts]

    def _read(self) -> None:
        """One frame, for everybody. After an error whoever reads next gets one, too."""
        try:
            self._take(*self._receive(SILENT_S))
        except BaseException:
            self.close()  # requests are still in flight
            raise

    def _take(self, frame: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """What vLLM says: that it works, or that a request is done."""
        if frame["is"] == "working":
            return
        draft = self.waiting.pop(str(frame.get("id")), None) if frame["is"] == "done" else None
        if draft is None:
            raise self._failure(f"it said {frame['is']!r} of {frame.get('id')!r}, which it was not asked for")
        self._extend(draft, frame.get("tokens"), tensors)
        reply = draft.reply()
        draft.tokens += reply
        if reply:
            self._ask([draft])
        else:
            draft.finish()

    def _ask(self, drafts: Sequence[Draft]) -> None:
        """Hand these to vLLM's scheduler."""
        with self._calls.changed:
            asked = {f"shoal-{next(self.numbers)}": draft for draft in drafts}
            self.waiting |= asked
            self._send({"do": "add", "requests": [{"id": id, **_request(draft)} for id, draft in asked.items()]})

    def close(self) -> None:
        """End the child process and everything it started. It may be called twice, and by several threads."""
        with self._closing:
            with contextlib.suppress(OSError):  # it is closed already
                self.connection.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
            self.connection.close()
            self.outward.close()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.path.cleanup()

    def _extend(self, draft: Draft, tokens: Any, tensors: dict[str, Tensor]) -> None:
        wrong = _fault(tokens, tensors, draft.sampling, draft.sampling.max_tokens - len(draft.tokens))
        if wrong:
            raise self._failure(f"a completion {wrong}")
        draft.tokens += tokens
        draft.logprobs += tensors["logprobs"].tolist()
        draft.states.append(tensors["hidden"])

    def _send(self, frame: dict[str, Any]) -> None:
        if self.process.poll() is not None:
            raise self._failure("it ended")
        try:
            self.outward.settimeout(SILENT_S)
            wire.send(self.outward, frame)
        except TimeoutError:
            raise self._failure(f"it did not listen for {SILENT_S:g} s") from None
        except (wire.ClosedError, OSError):  # or another thread closed the socket
            raise self._failure("it ended") from None

    def _expect(self, what: str, within_s: float) -> dict[str, Any]:
        frame, _ = self._receive(within_s)
        if frame["is"] != what:
            raise self._failure(f"it said {frame['is']!r} instead of {what!r}")
        return frame

    def _receive(self, within_s: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next frame. Raise VllmError if vLLM failed or ended, sent no whole frame in time, or sent something else."""
        try:
            frame, tensors = wire.receive(self.connection, within_s)
        except TimeoutError:
            raise self._failure(f"it said nothing for {within_s:g} s") from None
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
                raise self._failure(f"a frame that says {other!r}")

    def _failure(self, why: str) -> VllmError:
        """What to raise; the child process is ended."""
        self.close()
        status = self.process.returncode
        return VllmError(f"vLLM's process (status {status}): {why}; its own words are above, in this log")
