"""Random sequences of submissions and cancellations: each completion is the one that a plain loop yields, within the bounds.

The model is a fake whose keys are its tokens: a hidden state is a hash of all tokens before it, as the cache holds them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine import rows as rows_module
from shoal.engine.batch import DecodeRequest
from shoal.engine.rows import PackedPrompts, token_bytes
from shoal.engine.scheduler import Scheduler, SchedulerLimits, cache_bytes
from shoal.model import attention
from shoal.model.sampling import choose

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, HASHES = 24, 32
PROMPTS = [(5,), (5, 9, 13), tuple(range(2, 22)) * 3, (14, 11) * 60, (*range(2, 22), 4)]
ENDS = (1, 7)
PLACES = torch.arange(1, 1000) * 7919 % 997


def hashed(tokens: Sequence[int]) -> int:
    return sum((token + 1) * int(place) for token, place in zip(tokens, PLACES, strict=False)) % HASHES


def test_buffers_of_short_rows_have_little_room_to_spare() -> None:
    slots = rows_module.Slots("cpu")
    slots.receive(0, 0, PackedPrompts(0, [40] * 8))
    slots.update(torch.ones(1, 3, 320, 2), torch.ones(1, 3, 320, 2), 0)
    assert slots.positions == slots.buffers[0, 0].shape[2] <= 64
    slots.begin(torch.full((8,), 4096), 4097)
    assert slots.positions <= 4097 + rows_module.GROW_BY + rows_module.KEYS, (
        "room that a long row never fills is bounded"
    )


def test_buffers_shrink_when_half_of_the_rows_or_positions_is_not_needed() -> None:
    slots = rows_module.Slots("cpu")
    slots.receive(0, 0, PackedPrompts(0, [2] * 8))
    keys = torch.arange(16.0)[None, None, :, None]
    slots.update(keys, keys, 0)
    slots.keep([7, 1, 2, 3, 4], 2)
    assert slots.rows == 8, "more than half is used"
    slots.keep([3, 1, 2], 2)
    assert slots.rows == len(slots.buffers[0, 0]) == 3
    assert slots.buffers[0, 0][:, 0, :2, 0].tolist() == [[6.0, 7.0], [2.0, 3.0], [4.0, 5.0]]
    slots._grow(3, 5000)
    slots.keep([0, 1, 2], 2)
    assert slots.positions == slots.buffers[0, 0].shape[2] < 2500


def test_prompts_that_came_in_as_one_row_are_whole_again() -> None:
    row_TX = torch.arange(8.0)[:, None]  # two tokens that both begin with, the rests of one and of three, padding
    assert [x_LX[:, 0].tolist() for x_LX in PackedPrompts(2, [1, 3]).split(row_TX)] == [[0, 1, 2], [0, 1, 3, 4, 5]]
    assert [x_LX[:, 0].tolist() for x_LX in PackedPrompts(0, [1, 3]).split(row_TX)] == [[0], [1, 2, 3]]


class Fake:
    """What the engine asks of a model: a body with a cache, and an output head."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self.head = torch.nn.Linear(HASHES, VOCABULARY, bias=False)
        torch.nn.init.normal_(self.head.weight, std=2.0, generator=torch.Generator().manual_seed(seed))
        text = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1, head_dim=1)
        self.config = SimpleNamespace(_attn_implementation=attention.NAME, get_text_config=lambda decoder: text)
        self.base_model = self.body
        self.prefilled = 0  # tokens

    def get_decoder(self) -> Any:
        return self.base_model

    def get_output_embeddings(self) -> Any:
        return self.head

    def body(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Any, layout: Any = None, **_: Any
    ) -> Any:
        keys = (input_ids + 1.0)[:, None, :, None]
        keys, _ = past_key_values.update(keys, keys, 0)
        if layout is None:
            sums = (keys[:, 0, :, 0] * PLACES[: keys.shape[2]] * attention_mask[:, 0, 0]).sum(-1, keepdim=True)
        else:
            self.prefilled += keys.shape[2]
            root = keys[0, 0, : layout.root, 0]
            parts = [torch.cat([root, keys[0, 0, span.start : span.end, 0]]) for span in layout.spans]
            sums_T = [(part * PLACES[: len(part)]).cumsum(0) for part in parts]
            sums = torch.cat([part[layout.root if n else 0 :] for n, part in enumerate(sums_T)])[None]
        hashes = sums.long() % HASHES
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(hashes, HASHES).float())


@dataclass(eq=False)
class One:
    """A completion, and what happened to it."""

    model: Any
    ask: DecodeRequest
    ends: tuple[int, ...] = ENDS
    cancel_at: int | None = None
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    echoed: list[int] = field(default_factory=list)  # lengths of the prompts that came
    ended: bool = False
    left: int = 0  # how often it was told that it was cancelled

    def allowed(self) -> None: ...

    def began(self, hidden_LH: Tensor) -> None:
        self.echoed.append(len(hidden_LH))

    def position(self) -> int:
        return len(self.tokens)

    def take(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        assert not self.ended and not self.cancelled and logits_1V.shape[0] == 1
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.states.append(state_H.clone())
        self.ended = token in self.ends or len(self.tokens) == self.ask.max_tokens
        return None if self.ended else token


@pytest.fixture(scope="module")
def models() -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "GROW_BY", 16)  # so that short rows make buffers grow, too
        yield [Fake(0), Fake(1)]


def alone(one: One) -> tuple[list[int], list[float], list[int]]:
    """Tokens, logprobs and the hashes before each: one token at a time, with no other completion in the batch."""
    ask, weight = one.ask, one.model.head.weight.detach()
    tokens, logprobs, hashes = list[int](), list[float](), list[int]()
    while len(tokens) < ask.max_tokens and not (tokens and tokens[-1] in one.ends):
        hashes.append(hashed([*ask.prompt, *tokens]))
        token_1, logprob_1 = choose(weight.T[hashes[-1]][None], [ask.seed], [len(tokens)], ask.temperature)
        tokens.append(int(token_1))
        logprobs.append(float(logprob_1))
    return tokens, logprobs, hashes


asks = st.builds(
    DecodeRequest,
    prompt=st.sampled_from(PROMPTS),
    seed=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1.0, 1.3]),
    max_tokens=st.sampled_from([1, 2, 9, 40]),
    echo=st.booleans(),
)
submissions = st.lists(
    st.tuples(st.integers(0, 1), asks, st.integers(1, 3), st.integers(0, 6), st.none() | st.integers(0, 12)),
    min_size=1,
    max_size=8,
)
limits = st.tuples(st.integers(1, 6), st.sampled_from([1, 3, 8, 100]), st.sampled_from([1, 70, 2048]))


@settings(max_examples=15, deadline=None)
@given(submissions, limits)
def test_each_completion_is_the_one_that_it_is_alone(models: list[Any], asked: list[Any], bounds: Any) -> None:
    """`asked`: which model, what, how many, how many steps after the one before, after how many steps it is cancelled."""
    rows, long_rows, join_tokens = bounds
    coming, at = list[tuple[int, One]](), 0
    for model, ask, count, pause, cancel in asked:
        at += pause
        for copy in range(count):
            one = One(models[model], replace(ask, seed=ask.seed + 10 * copy))
            one.cancel_at = None if cancel is None or copy else at + cancel
            coming.append((at, one))
    decode(SchedulerLimits(rows, long_rows * token_bytes(models[0]) * 180, join_tokens), coming)


LONG, SHORT, BRIEF = (
    DecodeRequest(PROMPTS[3], 0, 1.0, 2),
    DecodeRequest((5,), 0, 1.0, 30),
    DecodeRequest((5,), 0, 1.0, 2),
)


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ([(0, 0, LONG), (0, 0, SHORT), *[(4, 0, SHORT)] * 5], 34),
        ([(0, 0, SHORT), *[(0, 0, BRIEF)] * 5, (4, 0, LONG)], 30),
        ([(0, 0, LONG), (0, 0, SHORT), *[(4, 1, SHORT)] * 2], 34),
    ],
    ids=["many after a long one", "a long one after many", "another model's after a long one"],
)
def test_what_rows_needed_that_left_is_not_held_for_others(
    models: list[Any], asked: list[tuple[int, int, DecodeRequest]], steps: int
) -> None:
    """Two long rows fit, or six short ones. Each is taken in at once."""
    coming = [(at, One(models[model], ask, ends=())) for at, model, ask in asked]
    assert decode(SchedulerLimits(cache_bytes=300 * token_bytes(models[0])), coming) == steps


def test_what_rows_that_left_still_hold_is_not_held_for_another_model(models: list[Any]) -> None:
    """Four of nine leave, too few to give room back. Three rows of the other model fit then, the fourth waits."""
    less = replace(SHORT, max_tokens=SHORT.max_tokens - 2)
    asked = [*[(0, 0, SHORT)] * 5, *[(0, 0, less)] * 4, *[(less.max_tokens, 1, SHORT)] * 4]
    coming = [(at, One(models[model], ask, ends=())) for at, model, ask in asked]
    assert decode(SchedulerLimits(cache_bytes=9 * 48 * token_bytes(models[0])), coming) == 2 * SHORT.max_tokens


def decode(limit: SchedulerLimits, coming: list[tuple[int, One]]) -> int:
    """Decode all of them, each from its step on. Returns the number of steps."""
    scheduler, everyone, step = Scheduler(limit), [one for _, one in coming], 0
    while coming or any(not (one.ended or one.left) for one in everyone):
        scheduler.add([one for due, one in coming if due <= step])
        coming = [(due, one) for due, one in coming if due > step]
        for one in everyone:
            one.cancelled = one.cancelled or (one.cancel_at == step and not one.ended)
        had = {id(one): len(one.tokens) for one in everyone}
        before = sum(model.prefilled for model in {one.model for one in everyone})
        touched = scheduler.step()
        new = [len(one.ask.prompt) for one in everyone if one.tokens and not had[id(one)]]
        prefilled = sum(model.prefilled for model in {one.model for one in everyone}) - before
        assert prefilled <= max([limit.join_tokens, *new])
        assert len({id(one) for one in touched}) == len(touched)
        for one in everyone:
            told, got = one in touched, len(one.tokens) - had[id(one)]
            one.left += told and one.cancelled
            assert got == (told and not one.cancelled), "told of each token, and of nothing else"
        decoded = [one for batch in scheduler.batches for one in batch.live]
        assert len(decoded) <= limit.rows
        buffers = [b for batch in scheduler.batches for b in batch.rows.cache.buffers.values()]  # type: ignore[attr-defined]
        held = sum(b.numel() * b.element_size() for b in buffers)
        assert held <= limit.cache_bytes or (len(decoded) == 1 and held <= cache_bytes(decoded[0].model, decoded))
        began = [bool(one.tokens) for one in everyone if not one.cancelled]
        assert began == sorted(began, reverse=True), "first come, first served"
        step += 1
        assert step < 1000
    assert not scheduler.everyone() and not scheduler.batches
    for one in everyone:
        tokens, logprobs, hashes = alone(one)
        n = len(one.tokens)
        assert one.ended == (n == len(tokens)) and one.left == (not one.ended)
        assert (one.tokens, one.logprobs) == (tokens[:n], logprobs[:n])
        assert [int(state.argmax()) for state in one.states] == hashes[:n]
        assert one.echoed == ([len(one.ask.prompt)] if one.ask.echo and n else [])
    return step
