"""Measure SHARDCAST's CPU seconds per GiB, compared with nginx, curl and b3sum, and its memory by file size.

    python -m benchmarks.weights.loopback [--rounds 5] [--size-mb 1024] [--sizes-mb 64 512 2048 8192]

Needs Linux, nginx, curl and b3sum. Transfers take turns over loopback. The CPU seconds of each process (user and system) are
measured:

    origin   `shoal origin` while one client fetches; publishing is counted separately
    relay    `shoal relay` receives a version, verifies it, then serves it to one client
    client   `shoal fetch` from the origin, from the relay, and from nginx over the origin's store
    plain    nginx (one worker, sendfile) serves the same file; curl writes it to disk; b3sum reads it back on one thread

A relay built from plain tools costs the sum of nginx, curl and b3sum. Each measurement is repeated with a version of 1 KiB,
which gives the cost of starting the processes. `net` leaves out that cost. A ratio is the median of the rounds' ratios.

Memory is VmRSS over time and its peak, for versions of several sizes. A version is many hard links to one random file, and a
store keeps each distinct shard once. So TMPDIR needs free space for only one version.

Writes benchmarks/results/loopback.json after each measurement.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks.common.machine import RESULTS, about, cpu_s, save
from benchmarks.common.process import next_json, running

SHOAL = str(Path(sys.executable).with_name("shoal"))
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
PRINTS = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
GIB, MIB = 1 << 30, 1 << 20
BLOCK_BYTES = 64 * MIB
TINY_BYTES = 1 << 10
FREE_BYTES = 2 << 30  # kept free on the disk
MOST_RATIO, MOST_SPREAD_MB = 1.3, 50
DEADLINE_S = 600.0
NGINX = """daemon off; pid {0}/nginx.pid; error_log {0}/nginx.log; user root; worker_processes 1; events {{}}
http {{ sendfile on; access_log off; server {{ listen 127.0.0.1:{1}; root {0}; }} }}
"""
Processes = list[tuple[str, str]]  # (way, process)
CURL_B3SUM: Processes = [("plain", "curl"), ("plain", "b3sum")]
ROWS: dict[str, tuple[Processes, Processes]] = {
    "origin / nginx": ([("direct", "origin")], [("plain", "nginx")]),
    "origin / nginx, to the same client": ([("direct", "origin")], [("over_nginx", "nginx")]),
    "relay / curl + b3sum + nginx": ([("through_relay", "relay")], [*CURL_B3SUM, ("plain", "nginx")]),
    "client of the origin / curl + b3sum": ([("direct", "client")], CURL_B3SUM),
    "client of a relay / curl + b3sum": ([("through_relay", "client")], CURL_B3SUM),
    "client of nginx / curl + b3sum": ([("over_nginx", "client")], CURL_B3SUM),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the CPU measurement")
    parser.add_argument("--size-mb", type=int, default=1024, help="size of the file in the CPU measurement")
    parser.add_argument(
        "--sizes-mb", type=int, nargs="*", default=[64, 512, 2048, 8192], help="sizes of the memory measurement"
    )
    parser.add_argument("--port", type=int, default=18470, help="port of nginx")
    arguments = parser.parse_args()
    result: dict[str, Any] = about()
    result |= {"size_bytes": arguments.size_mb * MIB, "publish_s": {}, "rounds": [], "memory": []}

    def keep(line: str) -> None:
        save(RESULTS / "loopback.json", result)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "nginx.conf").write_text(NGINX.format(folder, arguments.port))
        nginx = stack.enter_context(running(["nginx", "-c", folder / "nginx.conf"], **QUIET))
        turns = {}
        for what, size_bytes in {"full": result["size_bytes"], "tiny": TINY_BYTES}.items():
            turns[what] = Turn(folder / what, size_bytes, nginx, f"http://127.0.0.1:{arguments.port}/{what}", stack)
            result["publish_s"][what] = turns[what].publish_s
        for index in range(arguments.rounds):
            result["rounds"].append({what: turn.take(index) for what, turn in turns.items()})
            result["cpu"] = summary(result["rounds"], result["size_bytes"])
            keep(f"round {index + 1} of {arguments.rounds}")
    keep("\n".join(cpu_line(name, row) for name, row in result.get("cpu", {}).items()))
    for size_mb in arguments.sizes_mb:
        with tempfile.TemporaryDirectory() as name:
            result["memory"].append(memory(Path(name), size_mb))
        result["spread_mb"] = spread(result["memory"])
        keep(memory_line(result["memory"][-1]))
    keep(f"between the smallest and the largest peak, MB: {result.get('spread_mb')} (target {MOST_SPREAD_MB})")


# --- CPU ---


class Turn:
    """A version at its origin, and every way to fetch it."""

    def __init__(
        self, folder: Path, size_bytes: int, nginx: subprocess.Popen, plain_url: str, stack: ExitStack
    ) -> None:
        self.folder, self.size_bytes, self.nginx, self.plain_url = folder, size_bytes, nginx, plain_url
        folder.mkdir()
        digest = blake3()
        with (folder / "file").open("wb") as file:
            for at in range(0, size_bytes, BLOCK_BYTES):
                data = os.urandom(min(BLOCK_BYTES, size_bytes - at))
                digest.update(data)
                file.write(data)
        self.hash = digest.hexdigest()
        argv = [SHOAL, "origin", folder / "file", "--store", folder / "store", "--key-file", folder / "key.pem"]
        self.origin = stack.enter_context(running(argv, **PRINTS))
        facts = next_json(self.origin)
        self.url, self.key = facts["url"], facts["key"]
        had_s = cpu_s(self.origin.pid)
        next_json(self.origin)
        self.publish_s = round(cpu_s(self.origin.pid) - had_s, 4)

    def take(self, first: int) -> dict[str, dict[str, float]]:
        """Return the CPU seconds of each process. Rotate the order of the transfers from round to round."""
        ways = [self.direct, self.through_relay, self.over_nginx, self.plain]
        measured = {}
        for way in ways[first % len(ways) :] + ways[: first % len(ways)]:
            started_s = time.perf_counter()
            measured[way.__name__] = {name: round(s, 4) for name, s in way().items()}
            measured[way.__name__]["clock"] = round(time.perf_counter() - started_s, 3)
        return measured

    def direct(self) -> dict[str, float]:
        had_s = cpu_s(self.origin.pid)
        client_s = self.fetch(self.url)
        return {"origin": cpu_s(self.origin.pid) - had_s, "client": client_s}

    def through_relay(self) -> dict[str, float]:
        store, had_s = self.folder / "relay", cpu_s(self.origin.pid)
        self.settle()
        argv = [SHOAL, "relay", "--upstream", self.url, "--key", self.key, "--store", store]
        with running(argv, **PRINTS) as relay:
            url = next_json(relay)["url"]
            next_json(relay)
            received_s, origin_s = cpu_s(relay.pid), cpu_s(self.origin.pid) - had_s
            client_s = self.fetch(url)
            relay_s = cpu_s(relay.pid)
        shutil.rmtree(store)
        return {"origin": origin_s, "relay": relay_s, "relay, receiving": received_s, "client": client_s}

    def over_nginx(self) -> dict[str, float]:
        had_s = cpu_s(self.nginx.pid)
        client_s = self.fetch(f"{self.plain_url}/store")
        return {"nginx": cpu_s(self.nginx.pid) - had_s, "client": client_s}

    def plain(self) -> dict[str, float]:
        out, had_s = self.folder / "out", cpu_s(self.nginx.pid)
        self.settle()
        curl_s, _ = run(["curl", "-sS", "--fail", "-o", str(out), f"{self.plain_url}/file"])
        nginx_s = cpu_s(self.nginx.pid) - had_s
        b3sum_s, printed = run(["b3sum", "--num-threads", "1", "--no-names", str(out)])
        out.unlink()
        if printed.strip() != self.hash:
            raise SystemExit("curl did not write the file that nginx serves")
        return {"nginx": nginx_s, "curl": curl_s, "b3sum": b3sum_s}

    def fetch(self, url: str) -> float:
        out = self.folder / "out"
        self.settle()
        seconds, _ = run([SHOAL, "fetch", url, "--key", self.key, "--out", str(out)])
        if (out / "v000000" / "file").stat().st_size != self.size_bytes:
            raise SystemExit("the fetched file is not the published one")
        shutil.rmtree(out)
        return seconds

    def settle(self) -> None:
        """Give every transfer the same start: no dirty pages, and equally much memory just freed. The memory matters
        because a virtual machine needs seconds to get more of it from its host."""
        os.sync()
        with tempfile.TemporaryFile(dir=self.folder) as file:
            for _ in range(self.size_bytes // BLOCK_BYTES):
                file.write(bytes(BLOCK_BYTES))


def summary(rounds: Sequence[dict[str, Any]], size_bytes: int) -> dict[str, Any]:
    """Return CPU seconds per GiB and their ratio: gross, and net of the cost of a tiny version."""

    def both(processes: Processes) -> dict[str, list[float]]:
        full, tiny = (
            [sum(turns[what][way][process] for way, process in processes) * GIB / size_bytes for turns in rounds]
            for what in ("full", "tiny")
        )
        return {"gross": full, "net": [f - t for f, t in zip(full, tiny, strict=True)]}

    figures: dict[str, Any] = {}
    for name, (ours, plain) in ROWS.items():
        figures[name] = {}
        for (kind, ours_s), plain_s in zip(both(ours).items(), both(plain).values(), strict=True):
            ratio = statistics.median(a / b for a, b in zip(ours_s, plain_s, strict=True))
            medians = {"ours_s": statistics.median(ours_s), "plain_s": statistics.median(plain_s), "ratio": ratio}
            figures[name][kind] = {what: round(figure, 3) for what, figure in medians.items()}
    return figures


def cpu_line(name: str, row: dict[str, Any]) -> str:
    return f"{name:36}" + "".join(
        f" | {kind} {figures['ours_s']:.2f} / {figures['plain_s']:.2f} s per GiB = {figures['ratio']:.2f}"
        + (" MISSED" if figures["ratio"] > MOST_RATIO else "")
        for kind, figures in row.items()
    )


# --- Memory ---


def memory(folder: Path, size_mb: int) -> dict[str, Any]:
    """Send a version from its origin to a relay and, when it is complete there, to a client."""
    if shutil.disk_usage(folder).free < size_mb * MIB + FREE_BYTES:
        return {"size_mb": size_mb, "skipped": f"{folder} has less than {size_mb + FREE_BYTES // MIB} MB free"}
    (folder / "source").mkdir()
    first = folder / "source" / "0000"
    first.write_bytes(os.urandom(min(size_mb * MIB, BLOCK_BYTES)))
    for index in range(1, -(-size_mb * MIB // BLOCK_BYTES)):
        os.link(first, first.with_name(f"{index:04d}"))
    argv = [SHOAL, "origin", first.parent, "--store", folder / "origin", "--key-file", folder / "key.pem"]
    with running(argv, **PRINTS) as origin:
        watched = {"origin": Watched(origin.pid)}
        facts = next_json(origin)
        size_bytes = next_json(origin)["size_bytes"]
        share(folder / "origin")
        argv = [SHOAL, "relay", "--upstream", facts["url"], "--key", facts["key"], "--store", folder / "relay"]
        with running(argv, **PRINTS) as relay:
            watched["relay"] = Watched(relay.pid)
            url = next_json(relay)["url"]
            next_json(relay)
            share(folder / "relay")
            argv = [SHOAL, "fetch", url, "--key", facts["key"], "--out", folder / "out"]
            with running(argv, **QUIET) as client:
                watched["client"] = Watched(client.pid)
                if client.wait(DEADLINE_S):
                    raise SystemExit(f"{client.args} failed")
    return {
        "size_mb": size_bytes // MIB,
        "peak_mb": {who: seen.peak_mb for who, seen in watched.items()},
        "rss_mb": {who: seen.rss_mb for who, seen in watched.items()},
        "rss_every_s": Watched.EVERY_S,
    }


class Watched(threading.Thread):
    """Samples a process's memory until it ends."""

    EVERY_S, LOOKS = 0.5, 20  # seconds between stored points; memory samples per point, for the peak

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak_mb = pid, 0.0
        self.rss_mb: list[float] = []
        self.start()

    def run(self) -> None:
        looks = 0
        while figures := self._look():
            self.peak_mb = figures["VmHWM"]
            if looks % self.LOOKS == 0:
                self.rss_mb.append(figures["VmRSS"])
            looks += 1
            time.sleep(self.EVERY_S / self.LOOKS)

    def _look(self) -> dict[str, float]:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return {}
        pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS")))
        return {name: round(int(text.split()[0]) / 1024, 1) for name, text in pairs}


def share(store: Path) -> None:
    """Replace shards with equal bytes by hard links to one file."""
    firsts: dict[str, Path] = {}
    for shard in sorted(store.glob("v*/*/*.shard")):
        first = firsts.setdefault(blake3(shard.read_bytes()).hexdigest(), shard)
        if first != shard:
            name = shard.with_name("again")
            os.link(first, name)
            name.replace(shard)


def spread(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    peaks = [row["peak_mb"] for row in rows if "peak_mb" in row]
    return {who: round(max(p[who] for p in peaks) - min(p[who] for p in peaks), 1) for who in (peaks or [{}])[0]}


def memory_line(row: dict[str, Any]) -> str:
    peaks = ", ".join(f"{who} {peak_mb:.0f} MB" for who, peak_mb in row.get("peak_mb", {}).items())
    return f"{row['size_mb']:6} MB: " + (f"peak {peaks}" if peaks else row["skipped"])


# --- Processes ---


def run(argv: list[str]) -> tuple[float, str]:
    """Run a command. Return its CPU seconds and its output."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        killer = threading.Timer(DEADLINE_S, process.kill)
        killer.start()
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        killer.cancel()
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)} failed")
    return used.ru_utime + used.ru_stime, printed


if __name__ == "__main__":
    main()
