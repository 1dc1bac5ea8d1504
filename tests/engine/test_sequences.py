"""Whatever is submitted and cancelled, each completion equals that of a plain loop, and every step keeps the limits.

The model is a fake. Its cached keys are the tokens plus 1, and a hidden state is a hash of all tokens in the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine import rows as rows_module
from shoal.engine.rows import CachedRows, PackedPrompts, token_bytes
from shoal.engine.scheduler import DecodeRequest, Scheduler, SchedulerLimits, cache_bytes
from shoal.model import attention
from shoal.model.sampling import choose

from .support import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, HASHES = 24, 32
PROMPTS = [(5,), (5, 9, 13), tuple(range(2, 22)) * 3, (14, 11) * 60, (*range(2, 22), 4)]
ENDS = (1, 7)
PLACES = torch.arange(1, 5000) * 7919 % 997


def hashed(tokens: Sequence[int]) -> int:
    return sum((token + 1) * int(place) for token, place in zip(tokens, PLACES, strict=False)) % HASHES


class Fake:
    """The parts of a model that the engine uses: a body with a cache, and an output head."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self.head = torch.nn.Linear(HASHES, VOCABULARY, bias=False)
        torch.nn.init.normal_(self.head.weight, std=2.0, generator=torch.Generator().manual_seed(seed))
        text = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1, head_dim=1)
        self.config = SimpleNamespace(_attn_implementation=attention.NAME, get_text_config=lambda decoder: text)
        self.base_model = self.body
        self.prefilled = 0  # number of prompt tokens computed so far

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
class Scheduled(Recorder):
    """A completion that is cancelled at step `cancel_at`, if that is set."""

    cancel_at: int | None = None
    dropped: int = 0  # how often the scheduler returned it as cancelled


@pytest.fixture(scope="module")
def models() -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "GROW_BY", 16)  # so that short rows make buffers grow, too
        yield [Fake(0), Fake(1)]


def test_the_spare_room_in_buffers_is_small_for_short_rows_and_bounded_for_long_ones() -> None:
    rows = CachedRows(Fake(0))
    rows.join([[token] * 40 for token in range(8)])
    assert rows.positions == rows.buffers[0, 0].shape[2] <= 64
    rows.lengths_B += 4056  # tokens
    rows.step(torch.zeros(8, dtype=torch.long))
    assert rows.positions <= 4097 + rows_module.GROW_BY + rows_module.KEYS, "a long row got too much spare room"


def test_buffers_shrink_when_half_of_the_rows_or_positions_is_not_needed() -> None:
    rows = CachedRows(Fake(0))
    rows.join([[2 * row, 2 * row + 1] for row in range(8)])
    rows.keep([7, 1, 2, 3, 4])
    assert rows.rows == 8, "the buffers shrank although more than half of the rows was in use"
    rows.keep([3, 1, 2])
    assert rows.rows == len(rows.buffers[0, 0]) == 3
    keys = rows.buffers[0, 0][:, 0, :2, 0] - 1  # the fake's keys are tokens + 1
    assert keys.tolist() == [[6.0, 7.0], [2.0, 3.0], [4.0, 5.0]]
    rows._grow(3, 5000)
    rows.keep([0, 1, 2])
    assert rows.positions == rows.buffers[0, 0].shape[2] < 2500


def test_prompts_that_were_packed_into_one_row_are_split_again() -> None:
    row_TX = torch.arange(8.0)[:, None]  # a shared prefix of two tokens, suffixes of one and of three, padding
    assert [x_LX[:, 0].tolist() for x_LX in PackedPrompts(2, [1, 3]).split(row_TX)] == [[0, 1, 2], [0, 1, 3, 4, 5]]
    assert [x_LX[:, 0].tolist() for x_LX in PackedPrompts(0, [1, 3]).split(row_TX)] == [[0], [1, 2, 3]]


def alone(seq: Recorder) -> tuple[list[int], list[float], list[int]]:
    """Generate this completion in a plain loop. Return its tokens, their logprobs and the hash before each token."""
    request, weight = seq.request, seq.model.head.weight.detach()
    tokens, logprobs, hashes = list[int](), list[float](), list[int]()
    while len(tokens) < request.max_tokens and not (tokens and tokens[-1] in seq.ends):
        hashes.append(hashed([*request.prompt, *tokens]))
        token_1, logprob_1 = choose(weight.T[hashes[-1]][None], [request.seed], [len(tokens)], request.temperature)
        tokens.append(int(token_1))
        logprobs.append(float(logprob_1))
    return tokens, logprobs, hashes


def decode(limits: SchedulerLimits, arrivals: list[tuple[int, Scheduled]]) -> int:
    """Decode completions that arrive at given steps, checking every step and result. Return the number of steps."""
    scheduler, sequences, step = Scheduler(limits), [seq for _, seq in arrivals], 0
    models = {seq.model for seq in sequences}
    while arrivals or any(not (seq.ended or seq.dropped) for seq in sequences):
        scheduler.add([seq for due, seq in arrivals if due <= step])
        arrivals = [(due, seq) for due, seq in arrivals if due > step]
        for seq in sequences:
            seq.cancelled = seq.cancelled or (seq.cancel_at == step and not seq.ended)
        had = {id(seq): len(seq.tokens) for seq in sequences}
        before = sum(model.prefilled for model in models)
        touched = scheduler.step()
        new = [len(seq.request.prompt) for seq in sequences if seq.tokens and not had[id(seq)]]
        assert sum(model.prefilled for model in models) - before <= max([limits.join_tokens, *new])
        assert len({id(seq) for seq in touched}) == len(touched)
        for seq in sequences:
            returned, got = seq in touched, len(seq.tokens) - had[id(seq)]
            seq.dropped += returned and seq.cancelled
            assert got == (returned and not seq.cancelled), (
                "a step must return exactly the completions that got a token or were dropped"
            )
        decoded = [seq for batch in scheduler.batches for seq in batch.live]
        assert len(decoded) <= limits.rows
        buffers = [buffer for batch in scheduler.batches for buffer in batch.rows.buffers.values()]
        held = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        assert held <= limits.cache_bytes or (len(decoded) == 1 and held <= cache_bytes(decoded[0].model, decoded))
        began = [bool(seq.tokens) for seq in sequences if not seq.cancelled]
        assert began == sorted(began, reverse=True), "a later completion began before an earlier one"
        step += 1
        assert step < 1000
    assert not scheduler.unfinished() and not scheduler.batches
    for seq in sequences:
        tokens, logprobs, hashes = alone(seq)
        n = len(seq.tokens)
        assert seq.ended == (n == len(tokens)) and seq.dropped == (not seq.ended)
        assert (seq.tokens, seq.logprobs) == (tokens[:n], logprobs[:n])
        assert [int(state.argmax()) for state in seq.states] == hashes[:n]
        assert seq.echoed == ([len(seq.request.prompt)] if seq.request.echo and n else [])
    return step


requests = st.builds(
    DecodeRequest,
    prompt=st.sampled_from(PROMPTS),
    seed=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1.0, 1.3]),
    max_tokens=st.sampled_from([1, 2, 9, 40]),
    echo=st.booleans(),
)
# (model, request, number of copies, steps since the previous submission, steps until the first copy is cancelled)
submissions = st.lists(
    st.tuples(st.integers(0, 1), requests, st.integers(1, 3), st.integers(0, 6), st.none() | st.integers(0, 12)),
    min_size=1,
    max_size=8,
)
# (rows, size of the cache in long rows, join_tokens)
limits = st.tuples(st.integers(1, 6), st.sampled_from([1, 3, 8, 100]), st.sampled_from([1, 70, 2048]))


@settings(max_examples=15, deadline=None)
@given(submissions, limits)
def test_each_completion_equals_the_one_decoded_alone(models: list[Any], submitted: list[Any], bounds: Any) -> None:
    rows, long_rows, join_tokens = bounds
    arrivals, at = list[tuple[int, Scheduled]](), 0
    for model, request, count, pause, cancel in submitted:
        at += pause
        for copy in range(count):
            seq = Scheduled(models[model], replace(request, seed=request.seed + 10 * copy), ENDS)
            seq.cancel_at = None if cancel is None or copy else at + cancel
            arrivals.append((at, seq))
    decode(SchedulerLimits(rows, long_rows * token_bytes(models[0]) * 180, join_tokens), arrivals)


LONG, SHORT, BRIEF = (
    DecodeRequest(PROMPTS[3], 0, 1.0, 2),
    DecodeRequest((5,), 0, 1.0, 30),
    DecodeRequest((5,), 0, 1.0, 2),
)
LESS = replace(SHORT, max_tokens=SHORT.max_tokens - 2)


# `arrivals` holds (step, model, request) of each completion. `positions` is the cache's size; 300 positions hold two
# long or six short rows.
@pytest.mark.parametrize(
    ("arrivals", "positions", "steps"),
    [
        ([(0, 0, LONG), (0, 0, SHORT), *[(4, 0, SHORT)] * 5], 300, 34),
        ([(0, 0, SHORT), *[(0, 0, BRIEF)] * 5, (4, 0, LONG)], 300, 30),
        ([(0, 0, LONG), (0, 0, SHORT), *[(4, 1, SHORT)] * 2], 300, 34),
        # Four of nine rows end, too few to shrink the buffers. Three rows of the other model fit; the fourth waits.
        ([*[(0, 0, SHORT)] * 5, *[(0, 0, LESS)] * 4, *[(LESS.max_tokens, 1, SHORT)] * 4], 9 * 48, 60),
    ],
    ids=["many after a long one", "a long one after many", "another model's after a long one", "half_empty buffers"],
)
def test_memory_of_finished_rows_is_freed_for_waiting_rows(
    models: list[Any], arrivals: list[tuple[int, int, DecodeRequest]], positions: int, steps: int
) -> None:
    """Every waiting row starts in the step in which it fits."""
    sequences = [(at, Scheduled(models[model], request)) for at, model, request in arrivals]
    assert decode(SchedulerLimits(cache_bytes=positions * token_bytes(models[0])), sequences) == steps
