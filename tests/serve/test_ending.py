"""A reply's tokens show how it ended, so a reply file cannot claim that a cut reply is complete."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.serve import proof
from shoal.serve.detokenizer import MAX_CHARACTER_TOKENS, Detokenizer, StopMatcher, detokenize
from shoal.serve.errors import ClientGoneError
from shoal.serve.generation import Generation, ServeRequest
from shoal.serve.prompt import encode
from shoal.serve.scheduler import ServeLimits, ServeScheduler
from shoal.serve.versions import LoadedModel

MESSAGES = [{"role": "user", "content": "one"}]
ENDING = "Does the reply end where the file says?"


def reply_of(loaded: LoadedModel, **params: Any) -> proof.Reply:
    """Generate a reply as the server does."""

    async def main() -> proof.Reply:
        scheduler = ServeScheduler(ServeLimits())
        scheduler.start()
        params_with_defaults: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_tokens": 100} | params
        request = ServeRequest(encode(loaded, MESSAGES), proof=True, **params_with_defaults)
        generation = Generation(request, loaded, asyncio.get_running_loop())
        scheduler.submit([generation])
        pieces = [piece async for piece in generation.pieces()]
        await asyncio.to_thread(scheduler.stop)
        text = "".join(piece.text for piece in pieces)
        return proof.build(generation, pieces[-1].finish or "", text, MESSAGES)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def reply(tiny: LoadedModel) -> proof.Reply:
    """A reply longer than one chunk of proofs, so that it can be cut after its first chunk."""
    reply = next(reply for seed in range(100) if len((reply := reply_of(tiny, seed=seed)).tokens) > 40)
    assert proof.verify(reply, tiny).passed
    return reply


def cut(reply: proof.Reply, loaded: LoadedModel, **lies: Any) -> proof.Reply:
    tokens = reply.tokens[:32]
    text = detokenize(Detokenizer(loaded.tokenizer, lies.get("stops", ()), loaded.eos_ids), tokens)
    return reply.model_copy(update={"tokens": tokens, "proofs": reply.proofs[:1], "text": text} | lies)


def failed(verdict: proof.ReplyVerdict) -> list[str]:
    return [finding.question for finding in verdict.findings if not finding.passed]


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
def test_a_cut_reply_cannot_claim_another_ending(tiny: LoadedModel, reply: proof.Reply, lies: dict[str, Any]) -> None:
    assert failed(proof.verify(cut(reply, tiny, **lies), tiny)) == [ENDING]


@pytest.mark.parametrize(
    ("lies", "ending"),
    [
        ({"finish": "length", "max_tokens": 32}, "it was cut at its limit of 32 tokens"),
        ({"finish": "cancelled"}, "it was stopped before its end"),
    ],
)
def test_the_verdict_on_a_cut_reply_says_that_it_was_cut(
    tiny: LoadedModel,
    reply: proof.Reply,
    lies: dict[str, Any],
    ending: str,
) -> None:
    verdict = proof.verify(cut(reply, tiny, **lies), tiny)
    assert verdict.passed and ending in verdict.sentence


def test_tokens_after_the_end_are_refused(tiny: LoadedModel, reply: proof.Reply) -> None:
    stop = reply.text[2:5]
    lie = {"stops": (stop,), "finish": "stop", "text": reply.text[: reply.text.index(stop)]}
    assert failed(proof.verify(reply.model_copy(update=lie), tiny)) == [ENDING]


def test_every_honest_ending_passes(tiny: LoadedModel, reply: proof.Reply) -> None:
    seed, stop = int(reply.seed), reply.text[3:6]
    params: list[dict[str, Any]] = [{"max_tokens": 20}, {"max_tokens": 33}, {"stops": (stop, "never so")}]
    for each in params:
        verdict = proof.verify(reply_of(tiny, seed=seed, **each), tiny)
        assert verdict.passed, verdict.lines()
    assert repr(stop) in verdict.sentence
    replies = (reply_of(tiny, seed=n, max_tokens=200) for n in range(200))
    complete = next(reply for reply in replies if reply.tokens[-1] in tiny.eos_ids)
    assert "the model ended it" in proof.verify(complete, tiny).sentence


def test_a_reply_file_must_name_the_version_of_the_loaded_weights(tiny: LoadedModel, reply: proof.Reply) -> None:
    loaded = replace(tiny, offer=replace(tiny.offer, version=3))
    assert proof.verify(reply.model_copy(update={"version": 3}), loaded).passed
    assert not proof.verify(reply.model_copy(update={"version": 9}), loaded).passed


def test_a_verification_ends_when_the_client_disconnects(tiny: LoadedModel, reply: proof.Reply) -> None:
    with pytest.raises(ClientGoneError):
        proof.verify(reply, tiny, client_left=lambda: True)
    answers = iter([False] * 20 + [True])
    with pytest.raises(ClientGoneError):  # the client disconnects between two tokens
        proof.verify(reply, tiny, client_left=lambda: next(answers))


def test_a_reply_with_another_text_is_refused_without_a_forward_pass(
    tiny: LoadedModel,
    reply: proof.Reply,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "forward_hidden", None)
    assert not proof.verify(reply.model_copy(update={"text": "another"}), tiny).passed


@pytest.mark.parametrize(
    ("margins", "passed"),
    [((0.7,), True), ((0.8,), False), ((0.7, 0.7, 0.7), False), ((float("nan"),), False), ((-0.1,), False)],
)
def test_a_short_reply_from_other_numerics_may_have_no_mismatched_token(
    tiny: LoadedModel,
    reply: proof.Reply,
    monkeypatch: pytest.MonkeyPatch,
    margins: tuple[float, ...],
    passed: bool,
) -> None:
    """A submission of thousands of tokens may have a few. In a short text, one changes the answer."""

    def some(_: object, tokens_N: torch.Tensor, *__: object) -> torch.Tensor:
        margins_N = torch.zeros(len(tokens_N))
        margins_N[: len(margins)] = torch.tensor(margins)
        return margins_N

    monkeypatch.setattr(proof, "replay_margins", some)
    verdict = proof.verify(reply, tiny)
    assert verdict.passed is passed and not verdict.exact


class CountingDecoder:
    """Decode a token below 999 to its character, 999 to an incomplete character, others to nothing. Count tokens."""

    decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return "".join("\ufffd" if token == 999 else chr(token) for token in tokens if token < 1000)


@pytest.mark.parametrize("token", [999, 1001])
def test_tokens_without_text_are_decoded_a_bounded_number_of_times(token: int) -> None:
    decoder, count = CountingDecoder(), 2000
    assert detokenize(Detokenizer(decoder), [token] * count) == ("\ufffd" * count if token == 999 else "")
    assert decoder.decoded < 6 * MAX_CHARACTER_TOKENS * count


def before_first_stop(text: str, stops: list[str]) -> str:
    """Return the text before the stop string that ends first. If several end at that place, the longest counts."""
    for end in range(1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - len(max(complete, key=len))]
    return text


@pytest.mark.parametrize("stops", [["aab"], ["abab", "baa"], ["aabaa", "ba"], ["bbbb"], ["aaaab", "ab", "abb"]])
def test_the_first_stop_string_ends_the_text_however_it_is_split_into_pieces(stops: list[str]) -> None:
    for number in range(1 << 9):
        text = "".join("ab"[number >> bit & 1] for bit in range(9))
        for size in (1, 2, 4, 9):
            detokenizer = Detokenizer(None, stops)
            pieces = [detokenizer._release(text[at : at + size]) for at in range(0, 9, size)]
            assert "".join([*pieces, detokenizer.end()]) == before_first_stop(text, stops), (text, size)


def test_a_stop_string_is_matched_in_linear_time() -> None:
    stop, steps = StopMatcher("a" * 399 + "b"), 0

    class Counted(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    stop._fallback = Counted(stop._fallback)
    for character in ("a" * 398 + "c") * 20:
        assert not stop.add(character)
    assert steps <= 399 * 20
