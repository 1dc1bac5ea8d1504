"""Runs lm-evaluation-harness as a child process against an OpenAI-compatible endpoint.

Invariant: a run's folder gets its final name only if the run succeeded. If a killed or failed run is repeated, it uses
the completions in lm_eval's cache.
Left out: suites that need logprobs of given continuations, because chat routes do not return these.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shoal.errors import ShoalError, UserError
from shoal.evals.suites import Suite
from shoal.sandbox import kernel

START_S = 900.0  # time that the server has to load the model
END_S = 10.0  # time that a child process has to end
LOG_CHARACTERS = 600  # an error quotes this much of the end of a log
KEY_VARIABLE = "OPENAI_API_KEY"
CONCURRENCY = 8  # concurrent requests


@dataclass(frozen=True)
class Endpoint:
    url: str  # ends with /v1
    model: str  # the server's model id


def check_installed() -> None:
    """Raise UserError unless lm_eval and its dependencies are installed."""
    if not all(importlib.util.find_spec(name) for name in ("lm_eval", "tenacity", "datasets")):
        raise UserError("evaluation needs lm-evaluation-harness: pip install 'shoal[evals]'")


@contextmanager
def serving(what: str, model: str, folder: Path, threads: int) -> Iterator[Endpoint]:
    """Run `shoal serve` on loopback for `what`, a run or model, and yield the endpoint of `model`. Raise ShoalError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "shoal", "serve", what, "--open", "--api-only", "--port", str(port)]
    command += ["--dir", str(folder), *(["--threads", str(threads)] if threads else [])]
    log = folder / "serve.log"
    with _child(command, log) as child:
        url = f"http://127.0.0.1:{port}/v1"
        _wait(child, url, log)
        yield Endpoint(url, model)


@contextmanager
def _child(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a child process that writes to `log`. The child ends with the block, or when its parent dies."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=environment, preexec_fn=_end_with_parent)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        kernel.call_prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(child: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise ShoalError(f"`shoal serve` ended with status {child.returncode}: {_tail(log)}")
        try:
            if httpx.get(f"{url.removesuffix('/v1')}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise ShoalError(f"`shoal serve` has not loaded the model after {START_S:.0f} s; see {log}")


def run(
    endpoint: Endpoint, suite: Suite, out: Path, *, seed: int, n: int, tasks: Path | None = None
) -> list[dict[str, Any]]:
    """Return the samples of one run of a suite, as lm_eval writes them, ordered by document. Raise ShoalError.

    `out` is the run's folder; if it exists, the run is not repeated. `n` is the number of documents; 0 means all.
    `tasks` is a folder of extra lm_eval tasks.
    """
    if not out.is_dir():
        part = out.with_name(f"{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # keep the cache, which is in another folder
        part.mkdir(parents=True)
        _run(endpoint, suite, part, out.with_name(f"{out.name}.cache"), seed, n, tasks)
        part.rename(out)
    samples = []
    for path in sorted(out.rglob("samples_*.jsonl")):
        # as bytes, because U+2028 in an answer would also end a line of text
        lines = [json.loads(line) | {"file": path.name} for line in path.read_bytes().splitlines()]
        chosen = suite.filter or (lines[0]["filter"] if lines else "")
        samples += sorted((line for line in lines if line["filter"] == chosen), key=lambda line: int(line["doc_id"]))
    if not samples:
        raise ShoalError(
            f"lm_eval wrote no samples of {suite.name} to {out}: remove that folder, then repeat the command"
        )
    return samples


def _run(endpoint: Endpoint, suite: Suite, out: Path, cache: Path, seed: int, n: int, tasks: Path | None) -> None:
    kwargs = {
        "temperature": suite.temperature,
        "do_sample": suite.temperature > 0,
        "max_gen_toks": suite.max_tokens,
        "seed": seed,
    }
    model = {
        "model": endpoint.model,
        "base_url": f"{endpoint.url.rstrip('/')}/chat/completions",
        "num_concurrent": CONCURRENCY,
        "max_retries": 5,
        "tokenized_requests": False,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--tasks", suite.task]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += ["--gen_kwargs", ",".join(f"{name}={value}" for name, value in kwargs.items())]
    command += ["--apply_chat_template", "--log_samples", "--output_path", str(out)]
    command += ["--use_cache", str(cache), *(["--limit", str(n)] if n else [])]
    command += ["--include_path", str(tasks)] if tasks else []
    log = out / "lm_eval.log"
    with _child(command, log, {KEY_VARIABLE: "none"} | os.environ) as child:
        status = child.wait()
    if status:
        raise ShoalError(
            f"lm_eval failed for {suite.task} at {endpoint.url} (status {status}; full log: {log}): {_tail(log)}"
        )


def _tail(log: Path) -> str:
    return " ".join(log.read_text("utf-8", errors="replace").split())[-LOG_CHARACTERS:]
