"""Rows that are filled again at once, within bounds, by whichever call comes next: nothing of it changes a bit."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine import batch
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.scheduler import Scheduler, SchedulerLimits
from shoal.engine.torch_engine import TorchEngine
from shoal.model import numerics

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 9, 33, 7], [12], list(range(4, 60)), [40, 41] * 20]
SEEDS = [[101, 102, 103], [201], [301, 302], [401, 402, 403, 404]]
SOME_END = Sampling(temperature=0.9, max_tokens=40, eos_ids=(1, 7, 20, 33))
Groups = list[list[Completion]]


@pytest.fixture(scope="module")
def exact(tiny_folder: Path) -> TorchEngine:
    if why := numerics.refusal("float32"):
        pytest.skip(f"exact numerics cannot be had here: {why}")
    engine = TorchEngine("float32", "cpu", "exact")
    engine.load(tiny_folder)
    return engine


@pytest.fixture(scope="module")
def alone(exact: TorchEngine) -> Groups:
    """Every completion by itself."""
    return [
        [exact.generate([prompt], [[seed]], SOME_END)[0][0] for seed in group]
        for prompt, group in zip(PROMPTS, SEEDS, strict=True)
    ]


class One:
    """A completion that never ends by itself."""

    def __init__(self, engine: TorchEngine, prompt: Sequence[int], seed: int) -> None:
        self.model, self.ask = engine.model, batch.DecodeRequest(tuple(prompt), seed, 1.0, 9)
        self.cancelled, self.got = False, 0

    def began(self, hidden_LH: Any) -> None: ...

    def allowed(self) -> None: ...

    def position(self) -> int:
        return self.got

    def take(self, token: int, *_: Any) -> int:
        self.got += 1
        return token


def limited(engine: TorchEngine, limits: SchedulerLimits) -> TorchEngine:
    """Another engine with the same model."""
    other = TorchEngine("float32", "cpu", "exact", limits)
    other.model = engine.model
    return other


def watch(engine: TorchEngine, seen: Any) -> None:
    """Call `seen` after every step."""
    step = engine._scheduler.step

    def watched() -> Any:
        touched = step()
        seen(touched)
        return touched

    engine._scheduler.step = watched  # type: ignore[method-assign]


def assert_same(groups: Groups, expected: Groups) -> None:
    for group, others in zip(groups, expected, strict=True):
        for one, other in zip(group, others, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
            assert torch.equal(one.hidden_TH, other.hidden_TH)


def test_places_are_filled_again_at_once_and_no_bit_changes(exact: TorchEngine, alone: Groups) -> None:
    engine, counts = limited(exact, SchedulerLimits(rows=3)), []
    watch(engine, lambda touched: counts.append((len(touched), len(engine._scheduler.waiting))))
    assert_same(engine.generate(PROMPTS, SEEDS, SOME_END), alone)
    assert max(count for count, _ in counts) == 3
    assert {count for count, waiting in counts if waiting} == {3}, "no place is empty while somebody waits"
    assert len(counts) < sum(len(c.tokens) for group in alone for c in group) / 2


def test_what_is_larger_than_the_cache_is_decoded_alone(exact: TorchEngine, alone: Groups) -> None:
    engine, counts = limited(exact, SchedulerLimits(cache_bytes=1)), []
    watch(engine, lambda touched: counts.append(len(touched)))
    assert_same(engine.generate(PROMPTS[:2], SEEDS[:2], SOME_END), alone[:2])
    assert set(counts) == {1}


def test_calls_from_several_threads_share_the_batch(exact: TorchEngine, alone: Groups) -> None:
    """The second call comes while the first one is decoded, and finishes before it."""
    engine, together, order = limited(exact, SchedulerLimits(rows=8)), set(), []
    watch(engine, lambda touched: together.add(len({id(one.sampling) for one in touched})))
    second: list[threading.Thread] = []
    found: dict[str, Groups] = {}

    def call(name: str, some: slice, respond: Any = None) -> None:
        sampling = Sampling(SOME_END.temperature, SOME_END.max_tokens, SOME_END.eos_ids)
        found[name] = engine.generate(PROMPTS[some], SEEDS[some], sampling, respond)
        order.append(name)

    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        if not second:
            second.append(threading.Thread(target=call, args=("second", slice(0, 1))))
            second[0].start()
            while not engine._new:  # until it has queued
                pass
        return None

    call("first", slice(2, 4), respond)
    second[0].join()
    assert_same(found["first"], alone[2:])
    assert_same(found["second"], alone[:1])
    assert 2 in together


def test_weights_cannot_change_while_a_completion_is_written(exact: TorchEngine, tiny_folder: Path) -> None:
    engine = limited(exact, SchedulerLimits())

    def respond(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="wait for generate"):
            engine.load(tiny_folder)

    ended = engine.generate(PROMPTS, SEEDS, SOME_END, respond)
    assert any(one.tokens[-1] in SOME_END.eos_ids for group in ended for one in group), "respond was asked"


def test_a_failure_of_the_model_reaches_every_caller_and_leaves_a_clean_engine(
    exact: TorchEngine, alone: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = limited(exact, SchedulerLimits(rows=2))
    with monkeypatch.context() as patch:
        patch.setattr(batch.DecodeBatch, "decode", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPTS, SEEDS, SOME_END)
    assert_same(engine.generate(PROMPTS, SEEDS, SOME_END), alone)


@pytest.mark.parametrize(
    ("prompt", "seed", "sampling"),
    [
        ([], 1, SOME_END),
        ([10**6], 1, SOME_END),
        ([5], -1, SOME_END),
        ([5], 1 << 64, SOME_END),
        ([5], 1, Sampling(0.9, 0, ())),
        ([5], 1, Sampling(float("nan"), 9, ())),
    ],
)
def test_what_would_end_everybodys_step_is_refused_before(
    exact: TorchEngine, alone: Groups, prompt: list[int], seed: int, sampling: Sampling
) -> None:
    engine, refused = limited(exact, SchedulerLimits()), []

    def respond(*_: Any) -> None:
        if not refused:
            with pytest.raises(ValueError, match=r"vocabulary|1 or more|64 bits") as found:
                engine.generate([prompt], [[seed]], sampling)
            refused.append(found)

    assert_same(engine.generate(PROMPTS, SEEDS, SOME_END, respond), alone)
    assert refused


def test_logits_in_several_parts_have_the_same_bits(
    exact: TorchEngine, alone: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "LOGITS_BYTES", 1)
    monkeypatch.setattr(batch, "CACHED", 3)
    many = [list(range(start, start + 9)) for start in (0, 100)]
    parts = limited(exact, SchedulerLimits()).generate(PROMPTS[:2], many, SOME_END)
    monkeypatch.undo()
    assert_same(parts, limited(exact, SchedulerLimits()).generate(PROMPTS[:2], many, SOME_END))


def test_a_cancelled_completion_leaves_whether_it_waits_or_is_decoded(exact: TorchEngine) -> None:
    scheduler, ones = Scheduler(SchedulerLimits(rows=2)), [One(exact, [5, 9], seed) for seed in range(4)]
    scheduler.add(ones)
    scheduler.step()
    ones[0].cancelled = ones[2].cancelled = True
    left = scheduler.step()
    assert [one.got for one in ones] == [1, 2, 0, 1] and all(one in left for one in ones), "its place is filled at once"
    left = scheduler.step()
    assert [one in left for one in ones] == [False, True, False, True]


@pytest.mark.parametrize("reads", range(1, 7))
def test_who_is_cancelled_by_another_thread_meanwhile_is_told_once(exact: TorchEngine, reads: int) -> None:
    class Hasty(One):
        """It is cancelled between two looks at it."""

        seen = 0

        @property
        def cancelled(self) -> bool:
            self.seen += 1
            return self.seen > reads

        @cancelled.setter
        def cancelled(self, value: bool) -> None: ...

    scheduler, ones = Scheduler(SchedulerLimits(rows=1)), [Hasty(exact, [5], 1), Hasty(exact, [5], 2)]
    scheduler.add(ones)
    told = [one for _ in range(20) for one in scheduler.step()]
    assert [told.count(one) - one.got for one in ones] == [1, 1] and not scheduler.everyone()


def test_no_row_begins_as_a_copy_of_a_cancelled_one(exact: TorchEngine, alone: Groups) -> None:
    """Its keys may be those of weights that were replaced since."""
    engine = limited(exact, SchedulerLimits())
    engine._scheduler.add([stale := One(exact, PROMPTS[0], 9)])
    engine._scheduler.step()
    for buffer in engine._scheduler.batches[0].rows.cache.buffers.values():  # type: ignore[attr-defined]
        with torch.inference_mode():
            buffer.add_(1.0)
    stale.cancelled = True
    assert_same(engine.generate(PROMPTS, SEEDS, SOME_END), alone)
