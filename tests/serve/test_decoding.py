"""Rows that join and leave: each gets what the engine gives it alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model import numerics
from shoal.serve.errors import BusyError, RequestError
from shoal.serve.generation import Generation, ServeRequest
from shoal.serve.scheduler import ServeLimits, ServeScheduler
from shoal.serve.text import Text, replay
from shoal.serve.versions import LoadedModel, Offer, load

pytestmark = pytest.mark.usefixtures("one_thread")


def held(folder: Path, kind: Any = "fast") -> LoadedModel:
    return load(Offer("tiny", None, folder), TorchEngine("float32", "cpu", kind))


def generation(of: LoadedModel, prompt: range, seed: int, max_tokens: int, **more: Any) -> Generation:
    ask = ServeRequest(tuple(prompt), seed, 1.0, max_tokens, **more)
    return Generation(ask, of, asyncio.get_running_loop())


async def finished(generations: list[Generation]) -> None:
    for one in generations:
        async for _ in one.pieces():
            pass


def decoded(of: LoadedModel, prompts: list[range], limits: ServeLimits) -> list[Generation]:
    """All of them, submitted one after the other while earlier ones are decoded."""

    async def main() -> list[Generation]:
        scheduler = ServeScheduler(limits)
        scheduler.start()
        generations = []
        for number, prompt in enumerate(prompts):
            generations.append(generation(of, prompt, 100 + number, 4 + 2 * number, proof=True))
            scheduler.submit(generations[-1:])
            await asyncio.sleep(0.002)
        await finished(generations)
        await asyncio.to_thread(scheduler.stop)
        return generations

    return asyncio.run(main())


PROMPTS = [range(5, 9), range(4, 60), range(7, 8), range(5, 30), range(10, 40), range(6, 12)]


def test_rows_that_join_and_leave_get_what_the_engine_gives_them_alone(tiny_folder: Path) -> None:
    if why := numerics.refusal("float32"):
        pytest.skip(f"exact numerics cannot be had here: {why}")
    of = held(tiny_folder, "exact")
    for one in decoded(of, PROMPTS, ServeLimits(rows=4)):
        settings = Sampling(1.0, one.ask.max_tokens, of.eos_ids)
        [[alone]] = of.engine.generate([one.ask.prompt], [[one.ask.seed]], settings)
        assert one.tokens == alone.tokens
        assert torch.equal(torch.stack(one.states), alone.hidden_TH)


def test_fast_rows_compute_their_own_tokens(tiny_folder: Path) -> None:
    of = held(tiny_folder)
    for one in decoded(of, PROMPTS, ServeLimits(rows=4)):
        plain = of.engine.model.base_model(
            input_ids=torch.tensor([[*one.ask.prompt, *one.tokens]]), use_cache=False
        ).last_hidden_state[0, len(one.ask.prompt) - 1 : -1]
        assert torch.allclose(torch.stack(one.states).float(), plain.float(), atol=0.05)


def test_a_queue_has_an_end_for_all_and_for_each(tiny_folder: Path) -> None:
    of = held(tiny_folder)

    async def main() -> None:
        scheduler = ServeScheduler(ServeLimits(rows=2, waiting=3, per_caller=4))  # not started: nothing leaves
        scheduler.submit([generation(of, range(5, 9), n, 4, caller="one") for n in range(4)])
        with pytest.raises(BusyError, match="one caller"):
            scheduler.submit([generation(of, range(5, 9), 9, 4, caller="one")])
        scheduler.submit([generation(of, range(5, 9), 9, 4, caller="two")])
        with pytest.raises(BusyError, match="waiting") as busy:
            scheduler.submit([generation(of, range(5, 9), 9, 4, caller="three")])
        assert 1 <= busy.value.retry_s <= 60

    asyncio.run(main())


def test_what_does_not_fit_the_cache_is_refused_and_what_fits_waits_for_room(tiny_folder: Path) -> None:
    of = held(tiny_folder)

    async def main() -> int:
        scheduler = ServeScheduler(ServeLimits(cache_bytes=of.token_bytes * 16 * 160))
        with pytest.raises(RequestError, match="lower max_tokens"):
            scheduler.submit([generation(of, range(5, 9), 1, 4000)])
        generations = [generation(of, range(5, 9), n, 24) for n in range(20)]  # 16 fit at a time
        scheduler.submit(generations)
        most = 0
        observe = scheduler._observe

        def count(*seen: Any) -> None:
            nonlocal most
            most = max(most, scheduler.live)
            observe(*seen)

        scheduler._observe = count
        scheduler.start()
        await finished(generations)
        await asyncio.to_thread(scheduler.stop)
        return most

    assert 1 <= asyncio.run(main()) <= 16


def test_a_failure_of_the_engine_ends_every_row_and_is_kept(tiny_folder: Path) -> None:
    of = held(tiny_folder)

    async def main() -> Exception | None:
        scheduler = ServeScheduler(ServeLimits())
        broken = generation(of, range(5, 9), 1, 8)
        broken.ask = ServeRequest((10**6,), 1, 1.0, 8)  # no such token
        scheduler.submit([broken])
        scheduler.start()
        await finished([broken])
        with pytest.raises(BusyError):
            scheduler.submit([generation(of, range(5, 9), 2, 8)])
        return scheduler.error

    assert isinstance(asyncio.run(main()), IndexError)


def test_characters_of_several_tokens_come_whole() -> None:
    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    text = Text(Bytes())
    pieces = [text.add(byte) for byte in "aé🙂b".encode()]
    assert "".join([*pieces, text.end()]) == "aé🙂b"
    assert "\ufffd" not in "".join(pieces)


def test_nothing_of_a_stop_string_is_ever_shown() -> None:
    class Letters:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, tokens))

    tokens = list(map(ord, "one STO two STOP three"))
    text = Text(Letters(), ["STOP"])
    pieces = [text.add(token) for token in tokens]
    assert "".join(pieces) == "one STO two " and text.stopped == "STOP"
    assert replay(Text(Letters(), ["absent"]), tokens) == "one STO two STOP three"
