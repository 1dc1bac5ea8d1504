"""Cause faults in processes, and end them.

    kill      kill -9 of the process alone; `shoal run` restarts it after a growing pause (0.5 to 8 s)
    freeze    SIGSTOP to the process and its children, later SIGCONT: its connections stay open and silent
    cut       the process's link is down: packets are dropped and no connection is refused
    slow      the process runs 1/10 of the time, in slices of 20 ms

Invariant: each pair of role and fault comes once before any comes twice. The seed determines the order, the processes and
the durations. A process has at most one fault at a time; its next fault waits until the last one ends.
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import psutil

from benchmarks.pool.churn.network import Network

KINDS = ("kill", "freeze", "cut", "slow")
LASTS_S = {"kill": (0.0, 0.0), "freeze": (5.0, 25.0), "cut": (5.0, 25.0), "slow": (15.0, 35.0)}
RUNS_S, STOPS_S = 0.02, 0.18


@dataclass
class Fault:
    """`begun_s` and `ended_s` are in seconds since the churn began. A kill ends when a new process has the same name."""

    kind: str
    role: str
    name: str
    lasts_s: float
    begun_s: float = 0.0
    ended_s: float | None = None

    def row(self) -> dict[str, object]:
        return asdict(self)


def draw(names: list[str], seed: int) -> Iterator[Fault]:
    """Yield faults for processes with these names, without end. A role is a name without its number."""
    chance = random.Random(seed)
    roles = sorted({role_of(name) for name in names})
    while True:
        deck = [(role, kind) for role in roles for kind in KINDS]
        chance.shuffle(deck)
        for role, kind in deck:
            name = chance.choice([name for name in names if role_of(name) == role])
            yield Fault(kind, role, name, round(chance.uniform(*LASTS_S[kind]), 1))


def role_of(name: str) -> str:
    return name.partition("-")[0]


def suffer(fault: Fault, pid: Callable[[str], int | None], network: Network, now_s: Callable[[], float]) -> None:
    """Cause the fault, end it after its time, and return when the process works again."""
    victim = pid(fault.name)
    if victim is None:
        raise ProcessLookupError(f"{fault.name} does not run")
    fault.begun_s = round(now_s(), 1)
    match fault.kind:
        case "kill":
            psutil.Process(victim).kill()
            while pid(fault.name) in (victim, None):
                time.sleep(0.1)
        case "freeze":
            _signal(victim, signal.SIGSTOP)
            time.sleep(fault.lasts_s)
            _signal(victim, signal.SIGCONT)
        case "cut":
            network.cut(fault.name)
            time.sleep(fault.lasts_s)
            network.mend(fault.name)
        case "slow":
            until_s = time.monotonic() + fault.lasts_s
            while time.monotonic() < until_s:
                _signal(victim, signal.SIGSTOP)
                time.sleep(STOPS_S)
                _signal(victim, signal.SIGCONT)
                time.sleep(RUNS_S)
    fault.ended_s = round(now_s(), 1)


def in_background(
    fault: Fault, pid: Callable[[str], int | None], network: Network, now_s: Callable[[], float]
) -> threading.Thread:
    thread = threading.Thread(target=suffer, args=(fault, pid, network, now_s), name=fault.name, daemon=True)
    thread.start()
    return thread


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):  # the process has just ended by itself
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)
