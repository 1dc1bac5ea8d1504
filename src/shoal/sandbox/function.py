"""A function that runs in children of a sandbox and is called with plain data: `channel.serve` inside, `Function` outside.

    preloaded = {"adder": "def add(pair): return sum(pair)"}
    with Sandbox("plain", Limits(cpu_s=1.0), preloaded=preloaded) as box:
        Function(box, "import adder, channel; channel.serve(adder.add)").call([1, 2]).value      # 3

Invariant: every call ends in time, with a value, with what the function raised, or at a limit; what comes back is made of
builtins alone, without sets and, behind a wall, without dicts: building one of hostile items takes quadratic time.
Left out: what a value means. The function's answers are only its word.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from shoal.sandbox.channel import WireError, pack, unpack
from shoal.sandbox.conversation import Conversation
from shoal.sandbox.limits import PLAIN, Program, Result, SandboxError
from shoal.sandbox.pool import MIN_WALL_S, Sandbox
from shoal.sandbox.process import PLAIN_START_S

END_S = 0.5  # for a child to end after its answer
UNLIMITED_BYTES = 1 << 60

T = TypeVar("T")
U = TypeVar("U")

Ending = Literal["answered", "raised", "timeout", "memory", "output", "died", "late"]


@dataclass(frozen=True)
class Call:
    """How a call ended: with `value`, an exception, a limit of its child, the child's death; or too late to begin."""

    ending: Ending
    value: Any = None
    detail: str = ""  # what was raised, or how the child died
    repeatable: bool = False  # it used at most half of each limit
    cpu_s: float = 0.0
    memory_bytes: int = 0


class Function:
    """A `program` that serves calls. `setup`, if there is one, is a call that comes before each of them.

    Every call runs in a fresh child, or with `keep` all in one child that stays warm: then only `wall_s` bounds a call, the
    first may take longer for its imports, and what the child prints goes to the log. A child that fails is replaced.
    """

    def __init__(self, sandbox: Sandbox, program: str, setup: Any = None, *, keep: bool = False) -> None:
        self.sandbox, self.keep = sandbox, keep
        self.program = Program(program, to_log=keep)
        self.setup = [] if setup is None else [pack(setup)]
        self._kept: Conversation | None = None
        self._ready = Call("late")  # the kept child's answer to the setup
        self._lock = threading.Lock()

    def call(self, value: Any) -> Call:
        """Raises SandboxError if the sandbox itself fails."""
        try:
            frame = pack(value)
        except WireError as error:
            return Call("raised", detail=f"it is called with something else than plain data ({error})")
        return self._call([*self.setup, frame])

    def calls(self, values: Sequence[Any]) -> list[Call]:
        """Call it with each value, as many at once as the sandbox has servers. Raises what `call` raises."""
        return self.in_threads(self.call, values)

    def in_threads(self, work: Callable[[T], U], items: Sequence[T]) -> list[U]:
        """Do `work`, which calls this function, on each item, as many at once as the sandbox has servers."""
        with ThreadPoolExecutor(self.sandbox.size) as threads:
            return list(threads.map(work, items))

    def set_up(self) -> Call:
        """Call it with the setup alone. Raises SandboxError."""
        return self._call(self.setup)

    def close(self) -> None:
        """End its children and the sandbox."""
        self._hang_up()
        self.sandbox.close()

    def _call(self, frames: Sequence[bytes]) -> Call:
        if self.sandbox.budget.over:
            return Call("late")
        if self.keep:
            with self._lock:
                return self._in_kept(frames)
        with self.sandbox.open(self.program) as talk:
            for frame in frames:
                talk.send(frame)
                call = self._read(talk, talk.receive())
                if call.ending != "answered":
                    break
            used = talk.close(END_S)
        return replace(call, repeatable=self._within_half(used), cpu_s=used.cpu_s, memory_bytes=used.memory_bytes)

    def _in_kept(self, frames: Sequence[bytes]) -> Call:
        started, limits = time.monotonic(), self.sandbox.limits
        if self._kept is None:
            unlimited = replace(
                limits, wall_s=math.inf, cpu_s=math.inf, memory_bytes=UNLIMITED_BYTES, output_bytes=UNLIMITED_BYTES
            )
            self._kept = self.sandbox.open(self.program, unlimited)
            self._ready = self._exchange(self.setup[0], PLAIN_START_S)
        call = self._ready
        if call.ending == "answered" and len(frames) > 1:
            call = self._exchange(frames[1], max(MIN_WALL_S, min(limits.wall_s, self.sandbox.budget.left_s)))
        if self._ready.ending != "answered" or call.ending not in ("answered", "raised"):
            self._hang_up()
        return replace(call, repeatable=time.monotonic() - started <= limits.wall_s / 2)

    def _exchange(self, frame: bytes, timeout_s: float) -> Call:
        assert self._kept is not None
        self._kept.send(frame)
        try:
            return self._read(self._kept, self._kept.receive(timeout_s))
        except SandboxError:
            self._kept = None  # its server died, and the conversation is closed
            raise

    def _hang_up(self) -> None:
        if self._kept is not None:
            with self._kept:  # leaving it kills the child
                self._kept = None

    def _read(self, talk: Conversation, answer: bytes | None) -> Call:
        if answer is None:
            result = talk.close()
            if result.outcome == "exited" or result.outcome == "killed":
                return Call("died", detail=f"its process ended ({result.outcome}, exit code {result.exit_code})")
            return Call(result.outcome)
        if answer[:1] == b"X":
            return Call("raised", detail=answer[1:].decode(errors="replace"))
        try:
            if answer[:1] != b"V":
                raise WireError("neither a value nor an exception")
            make_dict = dict if self.sandbox.tier == PLAIN else _refuse
            return Call("answered", unpack(answer[1:], _refuse, make_dict))
        except WireError as error:
            return Call("died", detail=f"its process answers with something else than plain data ({error})")

    def _within_half(self, used: Result) -> bool:
        limits = self.sandbox.limits
        pairs = ((used.cpu_s, limits.cpu_s), (used.wall_s, limits.wall_s), (used.memory_bytes, limits.memory_bytes))
        return all(spent <= limit / 2 for spent, limit in pairs)


def _refuse(*_: object) -> None:
    raise WireError("a set or a dict")
