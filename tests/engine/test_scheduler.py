"""When a row becomes free, a waiting completion of any caller takes it at once, if the limits allow.

No bit of a completion depends on the other completions in the batch.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine import scheduler as scheduler_module
from shoal.engine.protocol import Sampling
from shoal.engine.scheduler import DecodeBatch, DecodeRequest, Scheduler, SchedulerLimits
from shoal.engine.torch_engine import TorchEngine
from shoal.model import numerics

from .support import PROMPTS, SEEDS, Groups, Recorder, with_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

SOME_END = Sampling(temperature=0.9, max_tokens=40, eos_ids=(1, 7, 20, 33))


@pytest.fixture(scope="module")
def exact(tiny_folder: Path) -> TorchEngine:
    if why := numerics.refusal("float32"):
        pytest.skip(f"this machine cannot compute exactly: {why}")
    engine = TorchEngine("float32", "cpu", "exact")
    engine.load(tiny_folder)
    return engine


@pytest.fixture(scope="module")
def alone(exact: TorchEngine) -> Groups:
    """Every completion, each generated in a batch of its own."""
    return [
        [exact.generate([prompt], [[seed]], SOME_END)[0][0] for seed in group]
        for prompt, group in zip(PROMPTS, SEEDS, strict=True)
    ]


def sequence(engine: TorchEngine, prompt: Sequence[int], seed: int) -> Recorder:
    return Recorder(engine.model, DecodeRequest(tuple(prompt), seed, 1.0, 9))


def limited(engine: TorchEngine, limits: SchedulerLimits | None = None) -> TorchEngine:
    """Return another engine with the same model and the given limits."""
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


def test_a_free_row_is_filled_again_at_once_and_no_bit_of_a_completion_changes(
    exact: TorchEngine, alone: Groups
) -> None:
    engine, counts = limited(exact, SchedulerLimits(rows=3)), []
    watch(engine, lambda touched: counts.append((len(touched), len(engine._scheduler.waiting))))
    assert_same(engine.generate(PROMPTS, SEEDS, SOME_END), alone)
    assert max(count for count, _ in counts) == 3
    assert {count for count, waiting in counts if waiting} == {3}, "a row was empty while a completion waited"
    assert len(counts) < sum(len(c.tokens) for group in alone for c in group) / 2


def test_a_completion_larger_than_the_cache_is_decoded_alone(exact: TorchEngine, alone: Groups) -> None:
    engine, counts = limited(exact, SchedulerLimits(cache_bytes=1)), []
    watch(engine, lambda touched: counts.append(len(touched)))
    assert_same(engine.generate(PROMPTS[:2], SEEDS[:2], SOME_END), alone[:2])
    assert set(counts) == {1}


def test_calls_from_several_threads_share_the_batch(exact: TorchEngine, alone: Groups) -> None:
    """The second call starts while the first one is decoded, and finishes before it."""
    engine, calls_per_step = limited(exact, SchedulerLimits(rows=8)), set()
    watch(engine, lambda touched: calls_per_step.add(len({id(draft.sampling) for draft in touched})))
    second: list[threading.Thread] = []
    results: dict[str, Groups] = {}

    def call(name: str, some: slice, respond: Any = None) -> None:
        sampling = Sampling(SOME_END.temperature, SOME_END.max_tokens, SOME_END.eos_ids)
        results[name] = engine.generate(PROMPTS[some], SEEDS[some], sampling, respond)

    def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        if not second:
            second.append(threading.Thread(target=call, args=("second", slice(0, 1))))
            second[0].start()
            while not engine._new:  # until the second call is queued
                pass
        return None

    call("first", slice(2, 4), respond)
    second[0].join()
    assert_same(results["first"], alone[2:])
    assert_same(results["second"], alone[:1])
    assert 2 in calls_per_step


def test_loading_during_generate_is_refused(exact: TorchEngine, tiny_folder: Path) -> None:
    engine = limited(exact)

    def respond(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="wait for it to return"):
            engine.load(tiny_folder)

    groups = engine.generate(PROMPTS, SEEDS, SOME_END, respond)
    assert any(c.tokens[-1] in SOME_END.eos_ids for _, c in with_prompts(groups)), (
        "no completion ended early, so `respond` was never called"
    )


def test_an_error_of_the_model_reaches_every_caller_and_leaves_a_clean_engine(
    exact: TorchEngine, alone: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = limited(exact, SchedulerLimits(rows=2))
    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "decode", lambda self: 1 / 0)
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
def test_a_request_that_would_fail_the_whole_batch_is_refused_before_it_joins(
    exact: TorchEngine, alone: Groups, prompt: list[int], seed: int, sampling: Sampling
) -> None:
    engine, refused = limited(exact), []

    def respond(*_: Any) -> None:
        if not refused:
            with pytest.raises(ValueError, match=r"vocabulary|1 or more|64 bits") as error:
                engine.generate([prompt], [[seed]], sampling)
            refused.append(error)

    assert_same(engine.generate(PROMPTS, SEEDS, SOME_END, respond), alone)
    assert refused


def test_no_bit_changes_while_another_thread_loads_a_model(exact: TorchEngine, alone: Groups) -> None:
    """Meanwhile, transformers sets PyTorch's default dtype to that of the new model."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        same = limited(exact).generate(PROMPTS, SEEDS, SOME_END)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(same, alone)


def test_logits_in_several_chunks_have_the_same_bits(exact: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [list(range(start, start + 9)) for start in (0, 100)]
    whole = limited(exact).generate(PROMPTS[:2], seeds, SOME_END)
    monkeypatch.setattr(scheduler_module, "LOGITS_BYTES", 1)
    monkeypatch.setattr(scheduler_module, "CACHED", 3)
    assert_same(limited(exact).generate(PROMPTS[:2], seeds, SOME_END), whole)


def test_a_cancelled_completion_is_removed_whether_it_waits_or_is_decoded(exact: TorchEngine) -> None:
    scheduler, all_four = Scheduler(SchedulerLimits(rows=2)), [sequence(exact, [5, 9], seed) for seed in range(4)]
    scheduler.add(all_four)
    scheduler.step()
    all_four[0].cancelled = all_four[2].cancelled = True
    touched = scheduler.step()
    assert [len(seq.tokens) for seq in all_four] == [1, 2, 0, 1], (
        "the cancelled completion's row was not given to the fourth one"
    )
    assert all(seq in touched for seq in all_four)
    touched = scheduler.step()
    assert [seq in touched for seq in all_four] == [False, True, False, True]


@pytest.mark.parametrize("reads", range(1, 7))
def test_a_completion_cancelled_by_another_thread_during_a_step_is_returned_once(
    exact: TorchEngine, reads: int
) -> None:
    class Hasty(Recorder):
        """A sequence that another thread seems to cancel after the scheduler has read `cancelled` `reads` times."""

        seen = 0

        @property
        def cancelled(self) -> bool:  # type: ignore[override]
            self.seen += 1
            return self.seen > reads

        @cancelled.setter
        def cancelled(self, value: bool) -> None: ...

    request = DecodeRequest((5,), 1, 1.0, 30)
    scheduler, both = Scheduler(SchedulerLimits(rows=1)), [Hasty(exact.model, request), Hasty(exact.model, request)]
    scheduler.add(both)
    touched = [seq for _ in range(20) for seq in scheduler.step()]
    assert [touched.count(seq) - len(seq.tokens) for seq in both] == [1, 1] and not scheduler.unfinished()


def test_no_row_begins_as_a_copy_of_a_cancelled_one(exact: TorchEngine, alone: Groups) -> None:
    """Copying would be wrong, because the cancelled row's keys may come from weights that have since been replaced."""
    engine = limited(exact)
    engine._scheduler.add([stale := sequence(exact, PROMPTS[0], 9)])
    engine._scheduler.step()
    for buffer in engine._scheduler.batches[0].rows.buffers.values():
        with torch.inference_mode():
            buffer.add_(1.0)
    stale.cancelled = True
    assert_same(engine.generate(PROMPTS, SEEDS, SOME_END), alone)
