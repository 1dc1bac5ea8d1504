"""What a hostile rollout file costs a dashboard: a real process on a run's folder, an honest page before and after the file.

    python -m benchmarks.abuse_dashboard [--tokens 67108864] [--limit-gib 6] [--out FILE]

A rejected submission of about 2 kB names a first turn of --tokens tokens. Its group is asked for once. A result holds, in
MiB, the dashboard's memory before and its largest during the attack; the milliseconds that an honest page takes before and
after; and what the attack was answered. The process may use at most --limit-gib.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from machine import commit
from tests.cli.audit.recorded import MALLORY, record_run

from shoal.store.folder import Folder
from shoal.store.rollouts import read_submission, write_submission

HONEST = "/api/submissions/1/groups/0"
START_S, ANSWER_S, PAGES = 60.0, 120.0, 5


def attack_dashboard(folder: Path, *, tokens: int = 1 << 26, limit_gib: int = 6) -> dict[str, Any]:
    """`folder` is made, and must be empty or missing."""
    seq, size_bytes = plant(record_run(folder), tokens)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "shoal", "dashboard", str(folder), "--port", str(port)]
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_gib << 30, limit_gib << 30)),
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as client:
            wait_for(client)
            before_ms = honest_ms(client)
            with Memory(server.pid) as memory:
                before_mib = memory.now_mib()
                started_s = time.monotonic()
                try:
                    answer = str(client.get(f"/api/submissions/{seq}/groups/0").status_code)
                except httpx.HTTPError as error:
                    answer = type(error).__name__
                took_s = time.monotonic() - started_s
            alive = server.poll() is None
            after_ms = honest_ms(client) if alive else None
    finally:
        server.kill()
        server.wait()
    return {
        "file_bytes": size_bytes,
        "memory_before_mib": round(before_mib),
        "memory_largest_mib": round(memory.largest_mib),
        "honest_before_ms": round(before_ms, 1),
        "honest_after_ms": None if after_ms is None else round(after_ms, 1),
        "attack_s": round(took_s, 2),
        "attack_answer": answer,
        "alive": alive,
    }


def plant(folder: Path, tokens: int) -> tuple[int, int]:
    """The number and size of a rejected submission whose turns do not fit its tokens."""
    store = Folder(folder / "coordinator" / "store")
    path = folder / "work.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    [line] = [line for line in lines if line.get("reason") == "proof"]
    honest = read_submission(store.get("submissions", line["file"]), max_rows=64, max_tokens=64)
    rows = [replace(row, turns=[]) for row in honest.rows]
    for row in rows:
        object.__setattr__(row, "turns", [tokens, 1])  # past the type, which refuses them
    data = write_submission(honest.header, rows, MALLORY)
    line["file"] = store.put("submissions", data)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return line["submission"], len(data)


class Memory:
    """The largest resident memory of a process and its children, looked at every few milliseconds."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self.largest_mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def now_mib(self) -> float:
        try:
            every = [self.process, *self.process.children(recursive=True)]
            return sum(one.memory_info().rss for one in every if one.is_running()) / 2**20
        except psutil.NoSuchProcess:
            return 0.0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.largest_mib = max(self.largest_mib, self.now_mib())


def honest_ms(client: httpx.Client) -> float:
    """The fastest of a few, each later than the server keeps an answer."""
    times = []
    for _ in range(PAGES):
        started_s = time.monotonic()
        client.get(HONEST).raise_for_status()
        times.append(1000 * (time.monotonic() - started_s))
        time.sleep(1.1)
    return min(times)


def wait_for(client: httpx.Client) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            client.get("/api/open").raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 26)
    parser.add_argument("--limit-gib", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = attack_dashboard(Path(scratch) / "run", tokens=given.tokens, limit_gib=given.limit_gib)
    text = json.dumps(found | {"tokens": given.tokens, "commit": commit()}, indent=2) + "\n"
    sys.stdout.write(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
