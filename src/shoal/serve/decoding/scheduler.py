"""The loop that steps every live row of every loaded version by one token, and lets rows join and leave in between.

    drop rows whose client left -> take rows in -> for each version: draw a token a row, hand out text, step

It runs in a thread of its own; requests come from the event loop, and pieces go back to it once a step.
Invariant: at most `Limits.waiting` completions wait and `Limits.rows` are decoded; keys and values stay within
`Limits.cache_bytes`. A request that finds no room is told when to try again; no queue grows without bound.
Called by `service`. Left out: preemption, priorities.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.model.exact import rounded
from shoal.model.logprobs import token_logprobs
from shoal.model.numerics import ROW_UNIT
from shoal.model.sampling import choose
from shoal.serve.decoding.generation import Finish, Generation, Likely, Piece
from shoal.serve.decoding.rows import ROOM, Rows, bytes_per_token
from shoal.serve.versions import Held

IDLE_S = 0.5
LONGEST_RETRY_S = 60


@dataclass(frozen=True)
class Limits:
    rows: int = 64  # completions decoded at once, all versions together
    waiting: int = 128  # completions that wait for a row
    per_caller: int = 64  # completions of one caller, waiting or decoded
    cache_bytes: int = 4 << 30  # keys and values of all rows
    join_tokens: int = 2048  # of prompts, taken in between two steps; one longer prompt is taken alone


class BusyError(ShoalError):
    """There is no place for a request now. `retry_s`: when there may be one."""

    restart_helps = True

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class TooLargeError(ShoalError):
    """A request that does not fit the cache even alone."""


@dataclass
class Counts:
    """What happened since the start; the metrics read it."""

    started: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    cancelled: int = 0
    refused: int = 0


def scaled(logits_NV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Logits over each row's temperature (0 counts as 1), float32: the one definition for scheduler and proof."""
    divisor_N = torch.tensor([temperature or 1.0 for temperature in temperatures])
    return logits_NV.float() / divisor_N[:, None].to(logits_NV.device)


class Scheduler:
    def __init__(self, limits: Limits, observe: Callable[[Generation, Piece], None] | None = None) -> None:
        """`observe` sees every piece in the scheduler's thread, before it is handed over."""
        self.limits = limits
        self._observe = observe or (lambda generation, piece: None)
        self.counts = Counts()
        self.error: Exception | None = None  # what ended the loop
        self._waiting: deque[Generation] = deque()
        self._batches: list[_Batch] = []
        self._joining: list[Generation] = []  # taken from the queue, not in a batch yet
        self._callers: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="scheduler")
        self._row_s = 1.0  # how long a row lives, smoothed

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel everything and end the loop."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> int:
        return sum(len(batch.live) for batch in self._batches)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue completions, all or none. Raises BusyError, TooLargeError."""
        for generation in generations:
            self._check_size(generation)
        with self._changed:
            if self._stopping or self.error:
                raise BusyError("the server is stopping", 5)
            caller = generations[0].ask.caller
            if self._callers[caller] + len(generations) > self.limits.per_caller:
                self.counts.refused += len(generations)
                raise BusyError(
                    f"at most {self.limits.per_caller} completions of one caller at a time", self._retry_s()
                )
            if len(self._waiting) + len(generations) > self.limits.waiting + self._free():
                self.counts.refused += len(generations)
                raise BusyError(f"{len(self._waiting)} completions are waiting already", self._retry_s())
            self._callers[caller] += len(generations)
            self._waiting.extend(generations)
            self._changed.notify()

    def _free(self) -> int:
        return max(0, self.limits.rows - self.live)

    def _retry_s(self) -> int:
        turns = 1 + len(self._waiting) / self.limits.rows
        return max(1, min(LONGEST_RETRY_S, math.ceil(turns * self._row_s)))

    def _check_size(self, generation: Generation) -> None:
        alone = generation.held.token_bytes * ROW_UNIT * _positions(generation)
        if alone > self.limits.cache_bytes:
            raise TooLargeError(
                f"{len(generation.ask.prompt)} prompt tokens and max_tokens {generation.ask.max_tokens} need "
                f"{alone >> 20} MiB of cache, and this server has {self.limits.cache_bytes >> 20}; lower max_tokens"
            )

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except Exception as error:  # noqa: BLE001 - the thread's end; `service` raises it in the main thread
            self.error = error
        self._cancel_all()

    def _wait(self) -> bool:
        """Until there is something to do. False: stop."""
        with self._changed:
            while not self._stopping and not self._waiting and not self.live:
                self._changed.wait(IDLE_S)
            return not self._stopping

    def _step(self) -> None:
        out: list[tuple[Generation, Piece]] = []
        self._take_in(out)
        for batch in list(self._batches):
            out += batch.step()
            if not batch.live:
                self._batches.remove(batch)
        self.counts.steps += 1
        self.counts.tokens += sum(piece.finish != "cancelled" for _, piece in out)
        self._hand_out(out)

    def _take_in(self, out: list[tuple[Generation, Piece]]) -> None:
        """Move what waits into batches, first come first served, as far as rows, cache and `join_tokens` allow."""
        room = self.limits.join_tokens
        taken: list[Generation] = []
        with self._changed:
            while self._waiting:
                first = self._waiting[0]
                if first.cancelled:
                    out.append((self._waiting.popleft(), Piece("", finish="cancelled")))
                    continue
                new = 0 if any(first.ask.prompt is one.ask.prompt for one in taken) else len(first.ask.prompt)
                if self.live + len(taken) >= self.limits.rows or (taken and new > room) or not self._fits(first, taken):
                    break
                room -= new
                taken.append(self._waiting.popleft())
            self._joining = taken
        for held in {id(one.held): one.held for one in taken}.values():
            new_rows = [one for one in taken if one.held is held]
            batch = next((batch for batch in self._batches if batch.held is held), None)
            if batch is None:
                batch = _Batch(held)
                self._batches.append(batch)
            batch.join(new_rows)
            self.counts.started += len(new_rows)
            self.counts.prompt_tokens += sum(len(one.ask.prompt) for one in new_rows)
        self._joining = []

    def _fits(self, new: Generation, taken: Sequence[Generation]) -> bool:
        """Whether all keys and values, at full length, stay within the limit. Buffers are rectangles of rows."""
        used = 0
        everyone = [new, *taken, *(one for batch in self._batches for one in batch.live)]
        for held in {id(one.held): one.held for one in everyone}.values():
            own = [one for one in everyone if one.held is held]
            used += held.token_bytes * rounded(len(own), ROW_UNIT) * max(map(_positions, own))
        return used <= self.limits.cache_bytes

    def _cancel_all(self) -> None:
        with self._changed:
            self._stopping = True
            everyone = [*self._waiting, *self._joining, *(one for batch in self._batches for one in batch.live)]
            self._waiting.clear()
            self._batches.clear()
        unique = {id(one): one for one in everyone}.values()  # some may stand in a batch already
        self._hand_out([(one, Piece("", finish="cancelled")) for one in unique])

    def _hand_out(self, out: Sequence[tuple[Generation, Piece]]) -> None:
        now_s = time.monotonic()
        with self._changed:
            for generation, piece in out:
                self._observe(generation, piece)
                generation.last_s = now_s
                if piece.finish:
                    self._row_s += 0.1 * (now_s - generation.asked_s - self._row_s)
                    self._callers[generation.ask.caller] -= 1
                    if not self._callers[generation.ask.caller]:
                        del self._callers[generation.ask.caller]
                    self.counts.cancelled += piece.finish == "cancelled"
        loops = {id(generation.loop): generation.loop for generation, _ in out}
        for loop in loops.values():
            own = [(generation, piece) for generation, piece in out if generation.loop is loop]
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, own)


def _deliver(pieces: Sequence[tuple[Generation, Piece]]) -> None:
    for generation, piece in pieces:
        generation.hand_over(piece)


def _positions(generation: Generation) -> int:
    return len(generation.ask.prompt) + generation.ask.max_tokens + ROOM


class _Batch:
    """The live rows of one version."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.model: Any = held.engine.model
        self.rows = Rows(self.model)
        self.live: list[Generation] = []
        self.hidden_BH: Tensor | None = None  # that each row's next token is drawn from
        assert held.token_bytes == bytes_per_token(self.model.config, self.model.dtype.itemsize)

    @torch.inference_mode()
    def join(self, new: Sequence[Generation]) -> None:
        prompts = list({id(one.ask.prompt): one.ask.prompt for one in new}.values())
        groups = [next(n for n, prompt in enumerate(prompts) if prompt is one.ask.prompt) for one in new]
        hidden = self.rows.join(prompts, groups)
        for one, group in zip(new, groups, strict=True):
            if one.ask.echo:
                one.echoed = self._likely(hidden[group][:-1], one.ask.prompt[1:], one.ask.top or 0)
        last_NH = torch.stack([hidden[group][-1] for group in groups])
        self.hidden_BH = last_NH if self.hidden_BH is None else torch.cat([self.hidden_BH, last_NH])
        self.live += new

    @torch.inference_mode()
    def step(self) -> list[tuple[Generation, Piece]]:
        """Drop rows that left, draw a token for each other row, and compute the next step of those that continue."""
        out = [(one, Piece(one.text.end(), finish="cancelled")) for one in self.live if one.cancelled]
        self._keep([row for row, one in enumerate(self.live) if not one.cancelled])
        if not self.live:
            return out
        assert self.hidden_BH is not None
        logits_BV = self.model.lm_head(self.hidden_BH)
        tokens = self._draw(logits_BV)
        states_BH = self.hidden_BH.to("cpu", torch.bfloat16) if any(one.ask.proof for one in self.live) else None
        staying = []
        for row, (one, token) in enumerate(zip(self.live, tokens, strict=True)):
            one.tokens.append(token)
            if one.ask.proof and states_BH is not None:
                one.states.append(states_BH[row].clone())
            piece = self._piece(one, token, logits_BV[row : row + 1])
            out.append((one, piece))
            if not piece.finish:
                staying.append(row)
        self._keep(staying)
        if self.live:
            self.hidden_BH = self.rows.step(torch.tensor([one.tokens[-1] for one in self.live]))
        return out

    def _draw(self, logits_BV: Tensor) -> list[int]:
        """One token a row, by its own seed and temperature."""
        chosen = [0] * len(self.live)
        scaled_BV = scaled(logits_BV, [one.ask.temperature for one in self.live])
        for greedy in (True, False):
            rows = [row for row, one in enumerate(self.live) if (one.ask.temperature == 0.0) == greedy]
            if rows:
                seeds = [self.live[row].ask.seed for row in rows]
                positions = [len(self.live[row].tokens) for row in rows]
                tokens_N, _ = choose(scaled_BV[torch.tensor(rows)], seeds, positions, 0.0 if greedy else 1.0)
                for row, token in zip(rows, tokens_N.tolist(), strict=True):
                    chosen[row] = token
        return chosen

    def _piece(self, one: Generation, token: int, logits_1V: Tensor) -> Piece:
        finish: Finish | None = None
        text = ""
        if token in self.held.eos_ids:
            finish = "stop"
        else:
            text = one.text.add(token)
            if one.text.stopped:
                finish = "stop"
            elif len(one.tokens) >= one.ask.max_tokens:
                finish = "length"
        if finish:
            text += one.text.end()
        likely = () if one.ask.top is None else self._scored(logits_1V, (token,), one.ask.top)
        return Piece(text, tuple(likely), finish)

    def _likely(self, hidden_LH: Tensor, tokens: Sequence[int], top: int) -> list[Likely]:
        """Logprobs of the given tokens, some positions at a time: all logits of a long prompt would fill the memory."""
        found: list[Likely] = []
        for start in range(0, len(tokens), 256):
            logits_LV = self.model.lm_head(hidden_LH[start : start + 256])
            found += self._scored(logits_LV, tokens[start : start + 256], top)
        return found

    def _scored(self, logits_LV: Tensor, tokens: Sequence[int], top: int) -> list[Likely]:
        tokens_L = torch.tensor(tokens, device=logits_LV.device)
        own = token_logprobs(logits_LV, tokens_L).tolist()
        if not top:
            return [Likely(token, logprob) for token, logprob in zip(tokens, own, strict=True)]
        best = torch.log_softmax(logits_LV.float(), -1).topk(min(top, logits_LV.shape[-1]))
        pairs = [
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return [Likely(token, logprob, pair) for token, logprob, pair in zip(tokens, own, pairs, strict=True)]

    def _keep(self, rows: Sequence[int]) -> None:
        if len(rows) == len(self.live):
            return
        kept = _close_gaps(len(self.live), rows)
        self.rows.keep(kept)
        self.live = [self.live[row] for row in kept]
        self.hidden_BH = self.hidden_BH[torch.tensor(kept, dtype=torch.long)] if self.hidden_BH is not None else None
        if not kept:
            self.hidden_BH = None


def _close_gaps(n_rows: int, staying: Sequence[int]) -> list[int]:
    """The old row that each remaining row holds after rows from the end took the places of those that left.

    >>> _close_gaps(6, [0, 2, 3, 5])
    [0, 5, 2, 3]
    """
    stays = set(staying)
    from_the_end = (row for row in reversed(range(n_rows)) if row in stays)
    return [row if row in stays else next(from_the_end) for row in range(len(staying))]
