"""How a reply ends is derived from its tokens: a file cannot say that a cut reply is whole."""

from pathlib import Path
from typing import Any

import pytest

from shoal.serve import proof
from shoal.serve.errors import UnwantedError
from shoal.serve.generation import Generation, ServeRequest
from shoal.serve.prompt import encode
from shoal.serve.scheduler import ServeLimits, ServeScheduler
from shoal.serve.text import MAX_CHARACTER_TOKENS, Stop, Text, replay
from shoal.serve.versions import LoadedModel

from .test_decoding import held

MESSAGES = [{"role": "user", "content": "one"}]


@pytest.fixture(scope="module")
def of(tiny_folder: Path) -> LoadedModel:
    return held(tiny_folder)


def reply_of(of: LoadedModel, **asked: Any) -> proof.Reply:
    """What the server gives out for these stops, this seed and this limit."""
    import asyncio

    async def main() -> proof.Reply:
        scheduler = ServeScheduler(ServeLimits())
        scheduler.start()
        ask = ServeRequest(
            encode(of, MESSAGES), proof=True, **({"seed": 1, "temperature": 1.0, "max_tokens": 100} | asked)
        )
        one = Generation(ask, of, asyncio.get_running_loop())
        scheduler.submit([one])
        pieces = [piece async for piece in one.pieces()]
        await asyncio.to_thread(scheduler.stop)
        text = "".join(piece.text for piece in pieces)
        return proof.build(one, pieces[-1].finish or "", text, MESSAGES)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def reply(of: LoadedModel) -> proof.Reply:
    """Longer than the one chunk that the lies below leave of it."""
    found = next(one for seed in range(100) if len((one := reply_of(of, seed=seed)).tokens) > 40)
    assert proof.verify(found, of).passed
    return found


def cut(reply: proof.Reply, of: LoadedModel, **lies: Any) -> proof.Reply:
    tokens = reply.tokens[:32]
    text = replay(Text(of.tokenizer, lies.get("stops", ()), of.eos_ids), tokens)
    return reply.model_copy(update={"tokens": tokens, "proofs": reply.proofs[:1], "text": text} | lies)


@pytest.mark.parametrize(
    "lies",
    [
        {"finish": "stop", "stops": ("a text that never occurs",)},
        {"finish": "stop"},
        {"finish": "length"},
        {"finish": "length", "max_tokens": 33},
        {"finish": "cancelled", "max_tokens": 32},
        {"finish": "length", "max_tokens": 31},
    ],
)
def test_a_cut_reply_does_not_pass_for_one_that_ended(
    of: LoadedModel, reply: proof.Reply, lies: dict[str, Any]
) -> None:
    verdict = proof.verify(cut(reply, of, **lies), of)
    assert not verdict.passed
    assert [one.question for one in verdict.findings if not one.passed] == ["Does it end where it says?"]


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"finish": "length", "max_tokens": 32}, "it was cut at its limit of 32 tokens"),
        ({"finish": "cancelled"}, "it was stopped before its end"),
    ],
)
def test_a_cut_reply_that_says_so_passes_and_the_verdict_says_so_too(
    of: LoadedModel, reply: proof.Reply, lies: dict[str, Any], says: str
) -> None:
    verdict = proof.verify(cut(reply, of, **lies), of)
    assert verdict.passed and says in verdict.sentence


def test_tokens_behind_the_end_are_refused(of: LoadedModel, reply: proof.Reply) -> None:
    stop = reply.text[2:5]
    lie = reply.model_copy(update={"stops": (stop,), "finish": "stop", "text": reply.text[: reply.text.index(stop)]})
    verdict = proof.verify(lie, of)
    assert [one.question for one in verdict.findings if not one.passed] == ["Does it end where it says?"]


def test_every_honest_ending_passes(of: LoadedModel, reply: proof.Reply) -> None:
    seed = int(reply.seed)
    stop = reply.text[3:6]
    asked: list[dict[str, Any]] = [{"max_tokens": 20}, {"max_tokens": 33}, {"stops": (stop, "never so")}]
    for more in asked:
        verdict = proof.verify(reply_of(of, seed=seed, **more), of)
        assert verdict.passed, verdict.lines()
    assert repr(stop) in verdict.sentence
    ended = next(one for n in range(200) if (one := reply_of(of, seed=n, max_tokens=200)).tokens[-1] in of.eos_ids)
    assert "the model ended it" in proof.verify(ended, of).sentence


def test_the_version_of_a_file_is_checked_where_it_is_known(of: LoadedModel, reply: proof.Reply) -> None:
    from dataclasses import replace

    known = replace(of, offer=replace(of.offer, version=3))
    assert proof.verify(reply.model_copy(update={"version": 3}), known).passed
    assert not proof.verify(reply.model_copy(update={"version": 9}), known).passed


def test_a_verification_that_nobody_waits_for_ends(of: LoadedModel, reply: proof.Reply) -> None:
    with pytest.raises(UnwantedError):
        proof.verify(reply, of, unwanted=lambda: True)
    asked = iter([False] * 20 + [True])
    with pytest.raises(UnwantedError):  # between two tokens
        proof.verify(reply, of, unwanted=lambda: next(asked))


def test_what_is_refused_already_costs_no_forward_pass(
    of: LoadedModel, reply: proof.Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "forward_hidden", None)
    assert not proof.verify(reply.model_copy(update={"text": "another"}), of).passed


class Letters:
    """A token is a character; those above 1000 are no text, and 999 is an unfinished one. Counts what it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return "".join("\ufffd" if token == 999 else chr(token) for token in tokens if token < 1000)


@pytest.mark.parametrize("token", [999, 1001])
def test_tokens_that_make_no_text_cost_what_others_cost(token: int) -> None:
    letters, count = Letters(), 2000
    text = replay(Text(letters), [token] * count)
    assert text == ("\ufffd" * count if token == 999 else "")
    assert letters.decoded < 6 * MAX_CHARACTER_TOKENS * count


def naive(text: str, stops: list[str]) -> str:
    """The text before the stop string that is whole first; of several that are, the longest."""
    for end in range(1, len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - len(max(met, key=len))]
    return text


@pytest.mark.parametrize("stops", [["aab"], ["abab", "baa"], ["aabaa", "ba"], ["bbbb"], ["aaaab", "ab", "abb"]])
def test_the_first_stop_string_ends_the_text_whatever_the_tokens_are(stops: list[str]) -> None:
    for number in range(1 << 9):
        text = "".join("ab"[number >> bit & 1] for bit in range(9))
        for size in (1, 2, 4, 9):
            row = Text(None, stops)
            pieces = [row._release(text[at : at + size]) for at in range(0, 9, size)]
            shown = "".join([*pieces, row.end()])
            assert shown == naive(text, stops), (text, size)


def test_a_stop_string_is_matched_in_linear_time() -> None:
    stop, steps = Stop("a" * 399 + "b"), 0

    class Counted(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    stop._shorter = Counted(stop._shorter)
    for character in ("a" * 398 + "c") * 20:
        assert not stop.add(character)
    assert steps <= 399 * 20
