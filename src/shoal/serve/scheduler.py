"""The server's scheduler: admit requests, step the engine, and send each piece back to its client.

    add new requests -> one step of the engine's scheduler (`engine/scheduler`) -> deliver the pieces

The scheduler runs in its own thread. Requests come from the event loop, and pieces return to the loop once per step.
Invariant: no queue grows without bound. At most `limits.waiting` completions wait. Further requests are refused and
told when to retry.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.engine import scheduler as engine
from shoal.serve.errors import BusyError, RequestError
from shoal.serve.generation import Generation, Piece

IDLE_S = 0.5
STOP_S = 1.0
MAX_RETRY_S = 60


@dataclass(frozen=True)
class ServeLimits(engine.SchedulerLimits):
    rows: int = 64
    cache_bytes: int = 4 << 30
    waiting: int = 128  # completions that wait for a row
    per_caller: int = 64  # completions of one caller whose responses have not ended
    page_share: float = 1 / 8  # of `per_caller` and `cache_bytes`, for one user of the page, who may be a stranger


@dataclass
class Counts:
    """Counters since the start, exported as metrics."""

    completions: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    cancelled: int = 0
    refused: int = 0


class ServeScheduler:
    def __init__(self, limits: ServeLimits, observe: Callable[[Generation, Piece], None] | None = None) -> None:
        """`observe` is called with every piece, in the scheduler's thread, before delivery."""
        self.limits = limits
        self._observe = observe or (lambda generation, piece: None)
        self.counts = Counts()
        self.error: Exception | None = None  # the exception that ended the loop
        self._engine = engine.Scheduler(limits)
        self._submitted: list[Generation] = []  # not passed to the engine yet
        self._unfinished: dict[int, Generation] = {}  # by `id`, until the last piece is delivered
        self._callers: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="scheduler")
        self._row_s = 1.0  # moving average of the time from submission to the last piece

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel everything and end the loop. Wait at most STOP_S for the current step, which may be a long prefill."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._cancel_all()

    @property
    def waiting(self) -> int:
        return len(self._submitted) + len(self._engine.waiting)

    @property
    def live(self) -> int:
        return self._engine.live

    def submit(self, generations: Sequence[Generation], share: float = 1.0) -> None:
        """Queue all completions or none. Their caller may use `share` of a caller's quota and of the cache.

        Each uses its version until its last piece is delivered. Call `release` when their response ends. Raise BusyError
        or RequestError.
        """
        for generation in generations:
            self._check_size(generation)
        with self._changed:
            if self._stopping or self.error:
                raise BusyError("the server is stopping", 5)
            caller = generations[0].request.caller
            self.check_caller(caller, len(generations), share)
            if share < 1:
                self._check_share(generations, share)
            if self.waiting + len(generations) > self.limits.waiting + self._free_rows():
                self.counts.refused += len(generations)
                raise BusyError(f"{self.waiting} completions are waiting already", self._retry_s())
            self._callers[caller] += len(generations)
            self._submitted.extend(generations)
            self._unfinished |= {id(generation): generation for generation in generations}
            for generation in generations:
                generation.loaded.users += 1  # until `_deliver`: a slow client may read the response for hours
            self._changed.notify()

    def release(self, generations: Sequence[Generation]) -> None:
        """Cancel these completions and return them to their caller's quota.

        Call this when the response has been sent: what a slow client has not read yet fills memory.
        """
        for generation in generations:
            generation.cancel()
        with self._changed:
            self._callers -= Counter(generation.request.caller for generation in generations)

    def check_caller(self, caller: str, count: int, share: float = 1.0) -> None:
        """Raise BusyError if `count` more completions would exceed the caller's quota."""
        quota = int(share * self.limits.per_caller)
        if self._callers[caller] + count > quota:
            self.counts.refused += count
            raise BusyError(f"at most {quota} completions of one caller at a time", self._retry_s())

    def _check_share(self, new: Sequence[Generation], share: float) -> None:
        """Raise BusyError if the caller's completions would need more than its share of the cache. One request fits."""
        caller = new[0].request.caller
        running = [own for own in self._unfinished.values() if own.request.caller == caller]
        both = [*running, *new]
        longest_bytes = max(engine.cache_bytes(each.model, [each]) for each in both)  # the others are padded to it
        if running and longest_bytes * len(both) > share * self.limits.cache_bytes:
            self.counts.refused += len(new)
            raise BusyError("your other replies need the memory; wait for them, or lower max_tokens", self._retry_s())

    def _free_rows(self) -> int:
        return max(0, self.limits.rows - self.live)

    def _retry_s(self) -> int:
        rounds = 1 + self.waiting / self.limits.rows
        return max(1, min(MAX_RETRY_S, math.ceil(rounds * self._row_s)))

    def _check_size(self, generation: Generation) -> None:
        needed_bytes = engine.cache_bytes(generation.model, [generation])
        if needed_bytes > self.limits.cache_bytes:
            raise RequestError(
                f"{len(generation.request.prompt)} prompt tokens and max_tokens {generation.request.max_tokens} need "
                f"{needed_bytes >> 20} MiB of cache; this server has {self.limits.cache_bytes >> 20} MiB; lower max_tokens"
            )

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except Exception as error:  # noqa: BLE001 - `Service.check` raises it in the main thread
            self.error = error
        self._cancel_all()

    def _wait(self) -> bool:
        """Wait for work. Return False to stop."""
        with self._changed:
            while not self._stopping and not self.waiting and not self.live:
                self._changed.wait(IDLE_S)
            return not self._stopping

    def _step(self) -> None:
        with self._changed:
            self._engine.add(self._submitted)
            self._submitted = []
        stepped = [generation for generation in self._engine.step() if isinstance(generation, Generation)]
        pieces = [(generation, generation.piece()) for generation in stepped]
        decoded = [generation for generation, piece in pieces if piece.finish != "cancelled"]
        started = [generation for generation in decoded if not generation.last_piece_s]
        self.counts.completions += len(started)
        self.counts.prompt_tokens += sum(len(generation.request.prompt) for generation in started)
        self.counts.steps += 1
        self.counts.tokens += sum(not generation.request.prompt_only for generation in decoded)
        self._dispatch(pieces)

    def _cancel_all(self) -> None:
        with self._changed:
            self._stopping = True
            generations, self._submitted = list(self._unfinished.values()), []
        for generation in generations:
            generation.cancel()
        self._dispatch([(generation, generation.final_piece()) for generation in generations])

    def _dispatch(self, pieces: Sequence[tuple[Generation, Piece]]) -> None:
        now_s = time.monotonic()
        with self._changed:
            pieces = [(generation, piece) for generation, piece in pieces if id(generation) in self._unfinished]
            for generation, piece in pieces:
                self._observe(generation, piece)
                generation.last_piece_s = now_s
                if piece.finish:
                    del self._unfinished[id(generation)]
                    self._row_s += 0.1 * (now_s - generation.submitted_s - self._row_s)
                    self.counts.cancelled += piece.finish == "cancelled"
        loops = {id(generation.loop): generation.loop for generation, _ in pieces}
        for loop in loops.values():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, [pair for pair in pieces if pair[0].loop is loop])


def _deliver(pieces: Sequence[tuple[Generation, Piece]]) -> None:
    for generation, piece in pieces:
        generation.queue.put_nowait((generation, piece))
        if piece.finish:
            generation.loaded.users -= 1
