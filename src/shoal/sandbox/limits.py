"""Programs, their limits and their results, and the sandbox's errors.

Invariant: all classes here except `Budget` are immutable values.
Left out: comparing outputs. Expected outputs never enter the sandbox.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

MIB = 1 << 20
MIN_MEMORY_BYTES = 64 * MIB  # the interpreter itself takes about 25 MiB of address space

Tier = Literal["bubblewrap", "kernel"]
TIERS: tuple[Tier, ...] = get_args(Tier)  # strongest first
PLAIN = "plain"  # for code that this machine's owner trusts
Outcome = Literal["exited", "killed", "timeout", "memory", "output"]


class SandboxError(Exception):
    """The sandbox itself failed or does not work here. A program that fails gives a `Result`, never this error."""


class StartError(SandboxError):
    """A server did not start; the message holds the last line of its output."""


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program. The kernel or a process outside enforces each, so the program cannot raise them.

    `memory_bytes` is address space, including the interpreter's. `output_bytes` covers stdout, stderr and frames
    together. A program is one process. It cannot fork or execute another program. In the tier `plain`, the memory of
    preloaded imports does not count, and the number of processes is not limited. A program that used less than a fifth of
    `cpu_s` during `idle_s` of wall time waits or sleeps, and is stopped. One that a busy machine slows down is not.
    """

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_bytes: int = 512 * MIB
    output_bytes: int = MIB
    idle_s: float = math.inf


@dataclass(eq=False)
class Budget:
    """Wall time that many programs share. It is limited from `start` to `stop`, and unlimited otherwise.

    When it runs out, all running programs are stopped. A result does not tell whether that happened, so check `over`
    before you use the result.
    """

    clock: Callable[[], float] = time.monotonic
    until_s: float = math.inf

    def start(self, seconds: float) -> None:
        self.until_s = self.clock() + seconds

    def stop(self) -> None:
        self.until_s = math.inf

    @property
    def left_s(self) -> float:
        return self.until_s - self.clock()

    @property
    def over(self) -> bool:
        return self.left_s <= 0


@dataclass(frozen=True)
class Program:
    """Python source, run as `__main__` in an empty scratch folder."""

    source: str
    stdin: bytes = b""


@dataclass(frozen=True)
class Result:
    """How a program ended.

    exited   by itself, with `exit_code`
    killed   by a signal; `exit_code` is its negative number
    timeout  over `wall_s`, `idle_s` or `cpu_s`
    memory   by an uncaught MemoryError; a program can fake this without a gain, because it counts as a failure
    output   over `output_bytes`
    """

    outcome: Outcome
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    cpu_s: float  # of all its processes together, including start-up
    wall_s: float
    memory_bytes: int  # peak resident memory; in the tier `plain`, without the server's own
    tier: str
