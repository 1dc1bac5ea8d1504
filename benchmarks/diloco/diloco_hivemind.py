"""Compare an outer step of Shoal's meeting with one of hivemind's averager, on the same tensors and machine.

    python -m benchmarks.diloco.diloco_hivemind --hivemind PYTHON --out benchmarks/results/diloco_hivemind.json

PYTHON is an interpreter with hivemind 1.1.12 (`python -m venv v && v/bin/pip install hivemind==1.1.12`). OpenDiLoCo
(arXiv 2407.07852) averages with hivemind. Here hivemind's peers use its defaults, but send FP16, as in the paper, and form
one group of all peers.

For each number of peers, both engines (Shoal and hivemind) start, each peer in its own process. The engines take turns to
make an outer step. A step begins when all peers get their pseudo-gradients, which are random with known seeds. The average
travels as FP16 and is applied by SGD with Nesterov momentum. The step ends when the last peer has its new parameters.

Each step records its seconds, the CPU seconds of all processes of the engine, the bytes over loopback (in a network
namespace with no other traffic), the largest difference between the average that a peer used and the true average, and
whether all peers' parameters are bitwise equal. Needs root on Linux and iproute2.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.machine import about, save
from benchmarks.diloco.diloco_hivemind_peers import KIND, SIDE

PEERS = Path(__file__).with_name("diloco_hivemind_peers.py")


class Engine:
    def __init__(self, name: str, python: str, folder: Path, peers: int, count: int) -> None:
        self.name, self.processes = name, list[subprocess.Popen[str]]()
        self.python, self.size = python, [str(peers), str(count)]
        if name == "shoal":
            self.start("meeting", str(folder), *self.size)
            self.peers = [self.start("site", str(folder), str(peer), *self.size)[0] for peer in range(peers)]
        else:
            process, answer_of_first = self.start("hivemind", "", "0", *self.size)
            more = [
                self.start("hivemind", answer_of_first["address"], str(peer), *self.size)[0] for peer in range(1, peers)
            ]
            self.peers = [process, *more]

    def start(self, *words: str) -> tuple[Any, dict[str, Any]]:
        command = [self.python, str(PEERS), *words]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process, answer(process)

    def step(self, number: int) -> dict[str, Any]:
        for peer in self.peers:
            say(peer, f"{number}")
        for peer in self.peers:
            answer(peer)
        cpu_s, moved, begun_s = self.cpu_s(), loopback_bytes(), time.monotonic()
        for peer in self.peers:
            say(peer, "go")
        for peer in self.peers:
            answer(peer)
        seconds = time.monotonic() - begun_s
        cpu_s, moved = self.cpu_s() - cpu_s, loopback_bytes() - moved
        answers = [answer(peer) for peer in self.peers]
        return {
            "engine": self.name,
            "peers": len(self.peers),
            "seconds": round(seconds, 4),
            "of_them_forming_s": round(max(each["forming_s"] for each in answers), 4),
            "cpu_s": round(cpu_s, 3),
            "bytes": moved,
            "error": max(each["error"] for each in answers),
            "same_bits": len({each["digest"] for each in answers}) == 1,
            "groups": [each.get("group", len(self.peers)) for each in answers],
            "load": round(os.getloadavg()[0], 1),
        }

    def cpu_s(self) -> float:
        """Return the CPU seconds of all of this engine's processes so far."""
        result = 0.0
        for process in self.processes:
            own = psutil.Process(process.pid)
            for each in (own, *own.children(recursive=True)):
                times = each.cpu_times()
                result += times.user + times.system
        return result

    def end(self) -> None:
        for process in self.processes:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            process.wait()


def say(process: Any, word: str) -> None:
    process.stdin.write(word + "\n")
    process.stdin.flush()


def answer(process: Any) -> dict[str, Any]:
    """Return the process's next JSON line. Skip other lines, which hivemind prints."""
    for line in process.stdout:
        if line.startswith("{"):
            result: dict[str, Any] = json.loads(line)
            return result
    raise SystemExit(f"a process ended with status {process.wait()}")


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def idle_bytes(seconds: float) -> float:
    """Return the bytes per second over loopback while the engines are idle."""
    before = loopback_bytes()
    time.sleep(seconds)
    return round((loopback_bytes() - before) / seconds)


def medians(steps: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    result = {}
    for key in sorted({(each["engine"], each["peers"]) for each in steps}):
        chosen = [each for each in steps if (each["engine"], each["peers"]) == key]
        keys = ("seconds", "of_them_forming_s", "cpu_s", "bytes", "error")
        result["{} {}".format(*key)] = {name: statistics.median(each[name] for each in chosen) for name in keys}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind", required=True, help="a Python with hivemind")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--steps", type=int, default=8, help="counted steps of each engine; an uncounted one comes first"
    )
    parser.add_argument("--matrices", type=int, default=16, help=f"matrices of {SIDE} x {SIDE} numbers")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if os.environ.get("APART") != "1":  # restart in a network namespace with a loopback of its own
        up = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        os.execvpe(up[0], [*up, *sys.orig_argv], os.environ | {"APART": "1"})
    steps, idle = [], {}
    for peers in arguments.peers:
        with tempfile.TemporaryDirectory() as folder:
            shoal = Engine("shoal", sys.executable, Path(folder), peers, arguments.matrices)
            other = Engine("hivemind", arguments.hivemind, Path(folder), peers, arguments.matrices)
            try:
                for number in range(arguments.steps + 1):
                    result = [engine.step(number) for engine in (shoal, other)[:: 1 if number % 2 else -1]]
                    steps += result if number else []
                idle[str(peers)] = idle_bytes(5.0)
            finally:
                for engine in (shoal, other):
                    engine.end()
    record = {
        **about(),
        "parameters": arguments.matrices * SIDE * SIDE,
        "kind": KIND,
        "idle_bytes_per_s_by_peers": idle,
        "medians": medians(steps),
        "steps": steps,
    }
    save(arguments.out, record)
    print(json.dumps(record["medians"], indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
