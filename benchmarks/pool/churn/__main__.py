"""Cause a fault in a random process of a whole run every 20 s. Check that no accepted work is lost.

    python -m benchmarks.pool.churn --minutes 15 --out benchmarks/results/churn.json

The run trains the tiny model with 8 workers, 2 validators, 2 relays, a learner, an origin, a coordinator and an evaluator.
Each process has its own network namespace (network.py); `shoal run` starts and restarts it. From the first trained step on,
for `--minutes`, a process of a random role is killed, frozen, cut off or slowed every 20 s (faults.py). `tokens_per_s`
counts the tokens trained on during that time. With `--no-faults` it is measured without faults. Then the run is stopped as
with Ctrl-C and resumed for its last 8 steps. Last, verdict.py lists what is wrong.

Needs root on Linux and iproute2. The result holds every fault, every observed node state other than `active`, the restarts
and the machine. The exit status is 0 if the run completed, the audit passed, no accepted work was lost and nobody was
penalised.
"""

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common.machine import INSIDE, ROOT, about, save
from benchmarks.pool.churn.faults import Fault, draw, in_background, role_of
from benchmarks.pool.churn.network import SUBNET, Network, enter, missing
from benchmarks.pool.churn.verdict import figures, judge
from shoal import config as config_module
from shoal.cli.launch import members
from shoal.cli.launch.children import Child, Children
from shoal.cli.launch.swarm import Swarm
from shoal.config import Config
from shoal.errors import ShoalError
from shoal.protocol.invite import Address

PORT = 8700
ROLES = ("coordinator", "learner", "origin", "relay", "validator", "worker")
PEACE_S, MORE_STEPS = 20.0, 8
STOPPED = 130  # exit status of a run that was stopped


class InNamespaces(Children):
    """The run's child processes, each in the network namespace of its name."""

    network: Network

    def start(self, name: str, command: list[str], module: str = "shoal.cli") -> Child:
        more = ["--listen", f"{self.network.address(name)}:0"] if name.startswith(("relay", "origin")) else []
        return super().start(name, ["--namespace", name, module, *command, *more], "benchmarks.pool.churn.node")


class Apart(Swarm):
    """`shoal run`, with each process in its own namespace."""

    def __init__(self, config: Config, run: str, out: Path, network: Network, address: str = "") -> None:
        super().__init__(config, run, out, address)
        self.children = InNamespaces(self.out / "logs", config.model.device, max_restarts=1000)
        self.children.network = network
        self.network = network


class Churned(Apart):
    """The same run, with faults injected into its processes for `--minutes`."""

    def __init__(self, config: Config, settings: argparse.Namespace, network: Network) -> None:
        super().__init__(config, "churn", settings.run, network)
        self.settings = settings
        self.faults: list[Fault] = []
        self.states: list[dict[str, Any]] = []
        self.churned_s = 0.0
        self.begun_at = math.inf  # POSIX time of the first fault

    def _watch(self) -> None:
        over = threading.Event()
        churning = threading.Thread(target=self._churn, args=(over,), name="churn")
        churning.start()
        try:
            super()._watch()
        finally:
            over.set()
            churning.join()

    def _churn(self, over: threading.Event) -> None:
        """Inject faults from the first trained step on."""
        while not over.is_set() and (self.status is None or not self.status.trained):
            over.wait(0.2)
        self.begun_at, begun_s, busy = time.time(), time.monotonic(), {}
        end_s = begun_s + 60 * self.settings.minutes
        names = [name for name in self.network.names if role_of(name) in self.settings.roles]
        for number, fault in enumerate([] if self.settings.no_faults else draw(names, self.settings.seed)):
            due_s = begun_s + number * self.settings.every
            while time.monotonic() < due_s and not over.wait(0.2):
                self._note_states(begun_s)
            if over.is_set() or time.monotonic() >= end_s:
                break
            while fault.name in busy and busy[fault.name].is_alive() and not over.is_set():
                busy[fault.name].join(0.2)  # a process has one fault at a time: wait until its last fault ends
            self.faults.append(fault)
            self._say(f"churn: {fault.kind} {fault.name} for {fault.lasts_s} s")
            busy[fault.name] = in_background(fault, self._pid, self.network, lambda: time.monotonic() - begun_s)
        while time.monotonic() < end_s and not over.wait(0.2):
            self._note_states(begun_s)
        self.churned_s = time.monotonic() - begun_s
        for fault in busy.values():
            fault.join()
        peace_s = time.monotonic() + PEACE_S
        while time.monotonic() < peace_s and not over.wait(0.2):
            self._note_states(begun_s)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does

    def tokens_per_s(self) -> float:
        """Return the tokens trained on per second of churn. Call this after the run has ended."""
        steps = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        churned = (step for step in steps if 0 < step["time_s"] - self.begun_at <= self.churned_s)
        return sum(step["perf/tokens"] for step in churned) / self.churned_s

    def last_leg(self) -> Apart:
        """Resume the stopped run for its last steps."""
        address = Address.read(self.out)
        steps = len((self.out / "metrics.jsonl").read_text().splitlines()) + MORE_STEPS
        config = config_module.load(self.out / "config.toml", [f"run.steps={steps}"])
        return Apart(config, address.run, self.out, self.network, address.url)

    def _pid(self, name: str) -> int | None:
        for child in self.children.all:
            if child.name == name and child.process and child.process.is_alive():
                return child.process.pid
        return None

    def _note_states(self, begun_s: float) -> None:
        """Record each node whose state has changed."""
        for node in self.status.nodes if self.status else []:
            before = next((seen["state"] for seen in reversed(self.states) if seen["name"] == node.name), "active")
            if node.state != before:
                now_s = round(time.monotonic() - begun_s, 1)
                seen = {"at_s": now_s, "name": node.name, "state": node.state, "reason": node.reason}
                self.states.append(seen | {"suspended_s": node.suspended_s})


CHOSEN = [
    "run.steps=100000",
    "validator.count=2",
    "relays.count=2",
    "relays.reach=private",
    f"coordinator.listen={SUBNET}.2:{PORT}",  # the address of the first of the network's names
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="minutes with faults")
    parser.add_argument("--every", type=float, default=20, metavar="S", help="seconds between two faults")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES, help="roles that get faults (default: all)")
    parser.add_argument("--no-faults", action="store_true", help="cause no faults, to compare tokens_per_s")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--run", type=Path, default=Path("runs/churn"), help="folder of the run; must not exist")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a field of the run's config"
    )
    parser.add_argument("--out", type=Path, help="write the result there")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside and (why := missing()):
        sys.stderr.write(f"churn: {why}\n")
        return 2
    enter()
    chosen = [*CHOSEN, f"workers.count={arguments.workers}", *arguments.set]
    config = config_module.load(ROOT / "configs" / "tiny.toml", chosen)
    network = Network(["coordinator", *(member.name for member in members.members(config))])
    swarm, failed, last = Churned(config, arguments, network), "", None
    try:
        if swarm.run() == STOPPED and swarm.churned_s:
            last = swarm.last_leg()
            last.run()
    except ShoalError as error:
        failed = str(error)
    wrong = judge(swarm.out, last.config.run.steps if last else 0) | ({"failed": [failed]} if failed else {})

    result = {
        **about(),
        "wrong": wrong,
        "churned_s": round(swarm.churned_s, 1),
        **({"tokens_per_s": swarm.tokens_per_s()} | figures(swarm.out) if not wrong["incomplete"] else {}),
        "faults": [fault.row() for fault in swarm.faults],
        "states": swarm.states,
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if arguments.out:
        save(arguments.out, result)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
