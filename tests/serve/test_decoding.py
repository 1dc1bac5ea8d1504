"""The scheduler and the detokenizer. Completions in a changing batch equal those that the engine generates alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine import scheduler as engine
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model import numerics
from shoal.serve.detokenizer import Detokenizer, detokenize
from shoal.serve.errors import BusyError, RequestError
from shoal.serve.generation import Generation, ServeRequest
from shoal.serve.scheduler import ServeLimits, ServeScheduler
from shoal.serve.versions import LoadedModel, Offer, load

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [range(5, 9), range(4, 60), range(7, 8), range(5, 30), range(10, 40), range(6, 12)]


def generation(loaded: LoadedModel, prompt: range, seed: int, max_tokens: int, **params: Any) -> Generation:
    request = ServeRequest(tuple(prompt), seed, 1.0, max_tokens, **params)
    return Generation(request, loaded, asyncio.get_running_loop())


async def finish(generations: list[Generation]) -> None:
    for each in generations:
        async for _ in each.pieces():
            pass


def decode(loaded: LoadedModel, limits: ServeLimits) -> list[Generation]:
    """Submit PROMPTS one after the other, while those submitted before are decoded. Return them when all are done."""

    async def main() -> list[Generation]:
        scheduler = ServeScheduler(limits)
        scheduler.start()
        generations = []
        for number, prompt in enumerate(PROMPTS):
            generations.append(generation(loaded, prompt, 100 + number, 4 + 2 * number, proof=True))
            scheduler.submit(generations[-1:])
            await asyncio.sleep(0.002)
        await finish(generations)
        await asyncio.to_thread(scheduler.stop)
        return generations

    return asyncio.run(main())


def test_with_exact_numerics_completions_equal_those_of_the_engine_alone(tiny_folder: Path) -> None:
    if why := numerics.refusal("float32"):
        pytest.skip(f"exact numerics are not available here: {why}")
    loaded = load(Offer("tiny", None, tiny_folder), TorchEngine("float32", "cpu", "exact"))
    for each in decode(loaded, ServeLimits(rows=4)):
        sampling = Sampling(1.0, each.request.max_tokens, loaded.eos_ids)
        [[alone]] = loaded.engine.generate([each.request.prompt], [[each.request.seed]], sampling)
        assert each.tokens == alone.tokens
        assert torch.equal(torch.stack(each.states), alone.hidden_TH)


def test_with_fast_numerics_a_completion_keeps_the_states_of_its_own_tokens(tiny: LoadedModel) -> None:
    for each in decode(tiny, ServeLimits(rows=4)):
        expected = tiny.engine.model.base_model(
            input_ids=torch.tensor([[*each.request.prompt, *each.tokens]]), use_cache=False
        ).last_hidden_state[0, len(each.request.prompt) - 1 : -1]
        assert torch.allclose(torch.stack(each.states).float(), expected.float(), atol=0.05)


def test_the_number_of_waiting_completions_is_bounded_per_caller_and_in_total(tiny: LoadedModel) -> None:
    async def main() -> None:
        # The scheduler is not started, so nothing leaves the queue.
        scheduler = ServeScheduler(ServeLimits(rows=2, waiting=3, per_caller=4))
        scheduler.submit([generation(tiny, range(5, 9), n, 4, caller="one") for n in range(4)])
        with pytest.raises(BusyError, match="one caller"):
            scheduler.submit([generation(tiny, range(5, 9), 9, 4, caller="one")])
        scheduler.submit([generation(tiny, range(5, 9), 9, 4, caller="two")])
        with pytest.raises(BusyError, match="waiting") as busy:
            scheduler.submit([generation(tiny, range(5, 9), 9, 4, caller="three")])
        assert 1 <= busy.value.retry_s <= 60

    asyncio.run(main())


def test_a_share_bounds_the_completions_and_the_cache_of_one_caller(tiny: LoadedModel) -> None:
    async def main() -> None:
        def some(count: int, caller: str) -> list[Generation]:
            return [generation(tiny, range(5, 9), 0, 4, caller=caller) for _ in range(count)]

        # The schedulers are not started, so nothing is finished.
        scheduler = ServeScheduler(ServeLimits(per_caller=8))
        scheduler.submit(some(2, "one"), share=1 / 4)
        with pytest.raises(BusyError, match="at most 2 completions"):
            scheduler.submit(some(1, "one"), share=1 / 4)
        scheduler.submit(some(8, "two"))
        each_bytes = engine.cache_bytes(tiny.engine.model, some(1, "one"))
        scheduler = ServeScheduler(ServeLimits(cache_bytes=12 * each_bytes))
        scheduler.submit(some(4, "one"), share=1 / 4)  # the first request always fits
        scheduler.submit(some(2, "two"), share=1 / 4)
        scheduler.submit(some(1, "two"), share=1 / 4)
        for caller in ("one", "two"):
            with pytest.raises(BusyError, match="need the memory"):
                scheduler.submit(some(1, caller), share=1 / 4)

    asyncio.run(main())


def test_a_completion_counts_until_its_response_ends(tiny: LoadedModel) -> None:
    """If it counted only until it is decoded, what a slow client has not read could fill the memory."""

    async def main() -> None:
        scheduler = ServeScheduler(ServeLimits(per_caller=1))
        scheduler.start()
        first = generation(tiny, range(5, 9), 0, 4)
        scheduler.submit([first])
        await finish([first])
        with pytest.raises(BusyError, match="one caller"):
            scheduler.submit([generation(tiny, range(5, 9), 1, 4)])
        scheduler.release([first])
        scheduler.submit([generation(tiny, range(5, 9), 1, 4)])
        await asyncio.to_thread(scheduler.stop)

    asyncio.run(main())


def test_completions_larger_than_the_cache_are_refused_and_others_wait_for_room(tiny: LoadedModel) -> None:
    async def main() -> int:
        scheduler = ServeScheduler(ServeLimits(cache_bytes=tiny.token_bytes * 16 * 160))
        with pytest.raises(RequestError, match="lower max_tokens"):
            scheduler.submit([generation(tiny, range(5, 9), 1, 4000)])
        generations = [generation(tiny, range(5, 9), n, 24) for n in range(20)]  # the cache has room for 16 at a time
        scheduler.submit(generations)
        max_live = 0
        observe = scheduler._observe

        def count(*piece: Any) -> None:
            nonlocal max_live
            max_live = max(max_live, scheduler.live)
            observe(*piece)

        scheduler._observe = count
        scheduler.start()
        await finish(generations)
        await asyncio.to_thread(scheduler.stop)
        return max_live

    assert 1 <= asyncio.run(main()) <= 16


def test_an_engine_failure_ends_every_completion_and_is_reported(tiny: LoadedModel) -> None:
    async def main() -> Exception | None:
        scheduler = ServeScheduler(ServeLimits())
        broken = generation(tiny, range(5, 9), 1, 8)
        broken.request = ServeRequest((10**6,), 1, 1.0, 8)  # the vocabulary has no such token
        scheduler.submit([broken])
        scheduler.start()
        await finish([broken])
        with pytest.raises(BusyError):
            scheduler.submit([generation(tiny, range(5, 9), 2, 8)])
        return scheduler.error

    assert isinstance(asyncio.run(main()), IndexError)


class ByteTokenizer:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_characters_of_several_tokens_are_returned_whole() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = [detokenizer.add(byte) for byte in "aé🙂b".encode()]
    assert "".join([*pieces, detokenizer.end()]) == "aé🙂b"
    assert "\ufffd" not in "".join(pieces)


def test_no_part_of_a_stop_string_is_returned() -> None:
    tokens = list(b"one STO two STOP three")
    detokenizer = Detokenizer(ByteTokenizer(), ["STOP"])
    pieces = [detokenizer.add(token) for token in tokens]
    assert "".join(pieces) == "one STO two " and detokenizer.stopped == "STOP"
    assert detokenize(Detokenizer(ByteTokenizer(), ["absent"]), tokens) == "one STO two STOP three"
