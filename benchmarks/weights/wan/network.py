"""One namespace per node, joined by the emulated network of link.c.

Invariant: everything is created inside the mount, process and network namespaces that `enter` moves this program into,
and ends with the program. Nothing reaches the outside network. Each transfer has a new network, so that no system is
affected by the one before.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import namespaces

HERE = Path(__file__).parent
FOLDER = Path("/mnt")  # a file system in memory, visible only in this namespace
SYSCTLS = ("net.ipv4.tcp_no_metrics_save=1", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
SETUP = """link set lo up
link set wan0 up txqueuelen 10000
address add {address}/24 dev wan0 noprefixroute
route add 10.77.0.0/24 dev wan0 src {address} congctl {plan.congestion}
"""


def enter(peers: Path) -> None:
    """Restart this program in its own namespaces, with the peers' Python environment at FOLDER/peers."""
    namespaces.enter()
    for folder in (Path("/run"), FOLDER):
        run("mount", "-t", "tmpfs", "-o", "size=80%", "tmpfs", str(folder))
    (FOLDER / "peers").mkdir()
    if peers.is_dir():
        run("mount", "--bind", str(peers), str(FOLDER / "peers"))
    run("cc", "-O2", "-o", str(FOLDER / "link"), str(HERE / "link.c"))
    run("ip", "link", "set", "lo", "up")


@dataclass(frozen=True)
class Plan:
    """Rates are in bits per second, and count the headers of IP packets too."""

    origin_bps: float
    relay_bps: float
    client_bps: float
    relays: int
    clients: int
    rtt_ms: float
    loss: float  # probability that a packet between two nodes is lost
    queue_ms: float
    congestion: str

    def nodes(self) -> dict[str, float]:
        rates = {"origin": self.origin_bps}
        rates |= {f"relay{i}": self.relay_bps for i in range(self.relays)}
        return rates | {f"client{i}": self.client_bps for i in range(self.clients)}


class Network:
    def __init__(self, plan: Plan, seed: int) -> None:
        self.rates = plan.nodes()
        self.nodes = list(self.rates)
        for name in self.nodes:
            run("ip", "netns", "add", name)
        argv = [FOLDER / "link", plan.rtt_ms / 2, plan.loss, plan.queue_ms, seed]
        for name, rate in self.rates.items():
            argv += [name, rate, rate]
        self.link = subprocess.Popen(list(map(str, argv)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        for name in self.nodes:
            run("nsenter", f"--net=/run/netns/{name}", "sysctl", "-qw", *SYSCTLS)
            run("ip", "-n", name, "-batch", "-", stdin_text=SETUP.format(address=self.address(name), plan=plan))

    def address(self, name: str) -> str:
        return f"10.77.0.{self.nodes.index(name) + 1}"

    def relays(self) -> list[str]:
        return [name for name in self.nodes if name.startswith("relay")]

    def clients(self) -> list[str]:
        return [name for name in self.nodes if name.startswith("client")]

    def start(self, name: str, argv: Sequence[str | Path], log: Path, **more: Any) -> subprocess.Popen[str]:
        """Start a process on this node. Its output goes to `log`."""
        with log.open("ab") as out:
            return subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{name}", *map(str, argv)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                **more,
            )

    def kill(self, name: str) -> None:
        """Kill all processes of this node at once."""
        for pid in run("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):  # already ended
                os.kill(int(pid), signal.SIGKILL)

    def slow(self, name: str, factor: float) -> None:
        rate = self.rates[name] * factor
        self._say(f"rate {self.nodes.index(name) + 1} {rate} {rate}")

    def stats(self) -> dict[str, Any]:
        """Return the counters of link.c, per node."""
        self._say("stats")
        stats: dict[str, Any] = json.loads(self._answer())
        return stats | {"nodes": dict(zip(self.nodes, stats["nodes"], strict=True))}

    def rtt_ms(self) -> float:
        """Return the idle round-trip time between the first two clients, the minimum of five."""
        first, second = self.clients()[:2]
        ping = ["ping", "-q", "-c", "5", "-i", "0.2", self.address(second)]
        output = run("nsenter", f"--net=/run/netns/{first}", *ping)
        return float(output.rpartition("= ")[2].split("/")[0])

    def close(self) -> None:
        for name in self.nodes:
            self.kill(name)
        self.link.stdin.close()
        self.link.wait(10)
        for name in self.nodes:
            run("ip", "netns", "delete", name)

    def _say(self, line: str) -> None:
        self.link.stdin.write(line + "\n")
        self.link.stdin.flush()

    def _answer(self) -> str:
        line = self.link.stdout.readline()
        if not line:
            raise RuntimeError("the emulated network has ended; see above")
        return line


def run(*argv: str, stdin_text: str = "") -> str:
    """Return the command's output. Raise CalledProcessError if it fails; its stderr is shown."""
    return subprocess.run(argv, input=stdin_text, stdout=subprocess.PIPE, text=True, check=True).stdout
