"""A function that runs in children of a sandbox: `channel.serve` inside, `RemoteFunction` outside, plain data between them.

    preloaded = {"adder": "def add(pair): return sum(pair)"}
    with Sandbox("plain", ProgramLimits(cpu_s=1.0), preloaded=preloaded) as box:
        RemoteFunction(box, "import adder, channel; channel.serve(adder.add)").call([1, 2]).value      # 3

Invariant: every call ends in time: with a value, with the exception it raised, or at a limit. A value consists of builtins
only, without sets and, in confined tiers, without dicts: building one from hostile items takes quadratic time.
Left out: the meaning of a value. It is untrusted.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.sandbox.channel import WireError, pack, unpack
from shoal.sandbox.limits import PLAIN, Program, Result
from shoal.sandbox.pool import Sandbox
from shoal.sandbox.session import Session

END_S = 0.5  # for a child to end after its answer

Ending = Literal["answered", "raised", "timeout", "memory", "output", "died", "late"]


@dataclass(frozen=True)
class CallResult:
    """How a call ended: a value, an exception, a limit, its process died, or the budget was over before it started."""

    ending: Ending
    value: Any = None
    detail: str = ""  # the exception, or how the child died
    repeatable: bool = False  # used at most half of each limit
    cpu_s: float = 0.0
    memory_bytes: int = 0


class RemoteFunction:
    """Calls a `program`, each time in a fresh child. The child is first called with `setup`, if given."""

    def __init__(self, sandbox: Sandbox, program: str, setup: Any = None) -> None:
        self.sandbox, self.program = sandbox, Program(program)
        self.setup = [] if setup is None else [pack(setup)]

    def call(self, value: Any) -> CallResult:
        """Call the function in a fresh child. Raise SandboxError if the sandbox itself fails."""
        try:
            frames = [*self.setup, pack(value)]
        except WireError as error:
            return CallResult("raised", detail=f"the argument is not plain data ({error})")
        if self.sandbox.budget.over:
            return CallResult("late")
        with self.sandbox.open(self.program) as session:
            for frame in frames:
                session.send(frame)
                call = self._read(session, session.receive())
                if call.ending != "answered":
                    break
            used = session.close(END_S)
        return replace(call, repeatable=self._within_half(used), cpu_s=used.cpu_s, memory_bytes=used.memory_bytes)

    def calls(self, values: Sequence[Any]) -> list[CallResult]:
        """Call it with each value, `sandbox.size` at once. Raise what `call` raises."""
        with ThreadPoolExecutor(self.sandbox.size) as threads:
            return list(threads.map(self.call, values))

    def close(self) -> None:
        """End its children and the sandbox."""
        self.sandbox.close()

    def _read(self, session: Session, answer: bytes | None) -> CallResult:
        if answer is None:
            result = session.close()
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
        pairs = ((used.cpu_s, limits.cpu_s), (used.wall_s, limits.wall_s), (used.memory_bytes, limits.memory_bytes))
        return all(spent <= limit / 2 for spent, limit in pairs)


def _refuse(*_: object) -> None:
    raise WireError("a set or a dict")
