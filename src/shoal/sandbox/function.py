"""Call a function in a sandbox's child processes: `channel.serve` runs inside, `RemoteFunction` outside.

    preloaded = {"adder": "def add(pair): return sum(pair)"}
    with Sandbox("plain", ProgramLimits(cpu_s=1.0), preloaded=preloaded) as box:
        RemoteFunction(box, "import adder, channel; channel.serve(adder.add)").call([1, 2]).value      # 3

Invariant: every call ends in bounded time, with a value, with an exception or at a limit. A value consists only of
builtins. Sets are refused, and dicts too in confined tiers, because building them from hostile items takes quadratic
time.
Left out: the meaning of values. Values are untrusted.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.sandbox.channel import WireError, pack, unpack
from shoal.sandbox.limits import PLAIN, Program, Result
from shoal.sandbox.pool import Sandbox
from shoal.sandbox.process import SandboxProcess

END_S = 0.5  # how long a child may take to end after its answer

Ending = Literal["answered", "raised", "timeout", "memory", "output", "died", "late"]


@dataclass(frozen=True)
class CallResult:
    """How a call ended. `late`: the budget ran out before the call started."""

    ending: Ending
    value: Any = None
    detail: str = ""  # the exception, or how the child died
    repeatable: bool = False  # whether the call used at most half of each limit
    cpu_s: float = 0.0


class RemoteFunction:
    """The function that `program` serves. Each call runs in a fresh child of the sandbox. `close` closes the sandbox."""

    def __init__(self, sandbox: Sandbox, program: str) -> None:
        self.sandbox, self.program = sandbox, Program(program)
        self._kept: SandboxProcess | None = None
        self._lock = threading.Lock()  # guards `_kept`

    def call(self, value: Any) -> CallResult:
        """Call the function in a fresh child. Raise SandboxError if the sandbox itself fails."""
        try:
            frame = pack(value)
        except WireError as error:
            return CallResult("raised", detail=f"the argument is not plain data ({error})")
        if self.sandbox.budget.over:
            return CallResult("late")
        with self.sandbox.open(self.program) as process:
            process.send(frame)
            call = self._read(process, process.receive())
            used = process.close(END_S)
        return replace(call, repeatable=self._within_half(used), cpu_s=used.cpu_s)

    def call_kept(self, value: Any) -> CallResult:
        """Call a function without state in a child that is kept for the next call. Raise SandboxError, WireError.

        The limits hold for the whole life of a child. So a call that a kept child does not answer is repeated in a fresh
        one, which decides.
        """
        frame = pack(value)
        with self._lock:
            while True:
                kept, self._kept = self._kept, None
                process = kept or self.sandbox.open(self.program)
                process.send(frame)
                call = self._read(process, process.receive())
                if call.ending == "answered":
                    self._kept = process
                    return call
                process.close(END_S)
                if kept is None:
                    return call

    def calls(self, values: Sequence[Any]) -> list[CallResult]:
        """Call the function with each value, `sandbox.size` at once. Raise SandboxError."""
        with ThreadPoolExecutor(self.sandbox.size) as threads:
            return list(threads.map(self.call, values))

    def close(self) -> None:
        self.sandbox.close()

    def _read(self, process: SandboxProcess, answer: bytes | None) -> CallResult:
        if answer is None:
            result = process.close()
            if result.outcome == "exited" or result.outcome == "killed":
                return CallResult("died", detail=f"its process ended ({result.outcome}, exit code {result.exit_code})")
            return CallResult(result.outcome)
        if answer[:1] == b"X":
            return CallResult("raised", detail=answer[1:].decode(errors="replace"))
        try:
            if answer[:1] != b"V":
                raise WireError("neither a value nor an exception")
            make_dict = dict if self.sandbox.tier == PLAIN else _refuse
            return CallResult("answered", unpack(answer[1:], _refuse, make_dict))
        except WireError as error:
            return CallResult("died", detail=f"its process answered with something other than plain data ({error})")

    def _within_half(self, used: Result) -> bool:
        limits = self.sandbox.limits
        wall_s = min(limits.wall_s, limits.idle_s)
        pairs = ((used.cpu_s, limits.cpu_s), (used.wall_s, wall_s), (used.memory_bytes, limits.memory_bytes))
        return all(spent <= limit / 2 for spent, limit in pairs)


def _refuse(*_: object) -> None:
    raise WireError("a set or a dict")
