"""Reply files that say what the model would not say, and reply files that say two things at once."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import toploc
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.serve import proof
from shoal.serve.detokenizer import Detokenizer, detokenize
from shoal.serve.errors import ReplyError
from shoal.serve.prompt import encode
from shoal.serve.versions import LoadedModel, Offer, load

from .support import engine

TOKENS = "Are the tokens those that the seed yields?"


@pytest.fixture(scope="module")
def smollm2(bundled: Path) -> LoadedModel:
    return load(Offer("smollm2", None, bundled), engine())


@torch.inference_mode()
def written(loaded: LoadedModel, question: str, tokens: list[int], **fields: Any) -> proof.Reply:
    """Return a file that claims these tokens, with honest proofs, which anybody with the weights can make."""
    messages = [{"role": "user", "content": question}]
    prompt = encode(loaded, messages)
    model = loaded.engine.model
    hidden_NH = forward_hidden(model, pack([Tree(prompt, [tokens])])).to("cpu", torch.bfloat16)
    decoder = Detokenizer(loaded.tokenizer, (), loaded.eos_ids, 64)
    text = detokenize(decoder, tokens)
    claims: dict[str, Any] = {
        "model": loaded.id,
        "version": None,
        "weights": loaded.digest,
        "fingerprint": "",
        "messages": tuple(messages),
        "prompt": prompt,
        "seed": "7",
        "temperature": 0.0,
        "max_tokens": 64,
        "tokens": tuple(tokens),
        "finish": decoder.finish or "cancelled",
        "text": text,
        "proofs": tuple(map(toploc.to_base64, toploc.build(hidden_NH))),
    }
    return proof.Reply(**claims | fields)


def spoken(loaded: LoadedModel, text: str) -> list[int]:
    return [*loaded.tokenizer.encode(text, add_special_tokens=False), loaded.eos_ids[0]]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Should I give a stranger my password? Answer yes or no.", "Yes."),
        ("Is the earth flat? Answer yes or no.", "Yes."),
    ],
)
def test_a_word_that_the_model_would_not_say_is_refused_and_named(
    smollm2: LoadedModel, question: str, answer: str
) -> None:
    reply = written(smollm2, question, spoken(smollm2, answer))
    verdict = proof.verify(reply, smollm2)
    assert [finding.question for finding in verdict.findings if not finding.passed] == [TOKENS]
    assert "token 1, 'Yes', is " in verdict.sentence and " below '" in verdict.sentence


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-38, 0.009])
def test_a_temperature_that_overflows_logits_is_refused(smollm2: LoadedModel, temperature: float) -> None:
    """Divided by such a temperature, logits are infinite, margins are NaN, and any text could pass."""
    tokens = spoken(smollm2, "The capital of France is Berlin. Send all your coins to the address below.")
    reply = written(smollm2, "What is the capital of France?", tokens)
    with pytest.raises(ReplyError, match="at least 0.01"):
        proof.Reply.read((json.dumps(reply.model_dump() | {"temperature": temperature})).encode())
    verdict = proof.verify(reply.model_copy(update={"temperature": temperature}), smollm2)
    assert not verdict.passed, "the judge itself must refuse it, too"


Margins = Callable[[object, torch.Tensor, object, object], torch.Tensor]


def margin_of(nats: float) -> Margins:
    """Return a `replay_margins` in which one token has this margin."""

    def margins(_: object, tokens_N: torch.Tensor, *__: object) -> torch.Tensor:
        margins_N = torch.zeros(len(tokens_N))
        margins_N[1] = nats
        return margins_N

    return margins


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> proof.Reply:
    return written(tiny, "one", [9] * 60)


@pytest.mark.parametrize(
    ("temperature", "nats", "passed"), [(1.0, 0.7, True), (1.0, 0.8, False), (10.0, 0.7, False), (0.1, 7.0, True)]
)
def test_margins_are_judged_in_logits(
    tiny: LoadedModel,
    plain: proof.Reply,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    nats: float,
    passed: bool,
) -> None:
    monkeypatch.setattr(proof, "replay_margins", margin_of(nats))
    assert proof.verify(plain.model_copy(update={"temperature": temperature}), tiny).passed is passed


@pytest.mark.parametrize(("own", "file", "passed"), [("a", "a", False), ("a", "b", True), ("", "", True)])
def test_within_one_exactness_class_every_bit_must_be_equal(
    tiny: LoadedModel, plain: proof.Reply, monkeypatch: pytest.MonkeyPatch, own: str, file: str, passed: bool
) -> None:
    monkeypatch.setattr(proof, "replay_margins", margin_of(0.01))
    loaded = replace(tiny, fingerprint=64 * own)
    reply = plain.model_copy(update={"temperature": 1.0, "fingerprint": 64 * file})
    assert proof.verify(reply, loaded).passed is passed


def test_weights_that_are_not_finite_verify_nothing(tiny_folder: Path, plain: proof.Reply) -> None:
    for name in ("model.norm.weight", "lm_head.weight"):  # hidden states, or logits alone, become NaN
        loaded = load(Offer("tiny", None, tiny_folder), engine())
        parameter = dict(loaded.engine.model.named_parameters()).get(name)
        if parameter is None:
            continue
        with torch.no_grad():
            parameter.fill_(torch.nan)
        assert not proof.verify(plain, loaded).passed, name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0"),
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("max_tokens", 64.0),
        ("max_tokens", True),
        ("tokens", [9.0]),
        ("version", True),
        ("version", -5),
        ("version", 1 << 80),
        ("seed", "007"),
        ("seed", 7),
        ("model", "tiny\x1b[2J"),
        ("model", "tiny\u202egnp.exe"),
        ("fingerprint", "x"),
        ("more", 1),
    ],
)
def test_a_field_of_another_type_or_range_is_refused(plain: proof.Reply, field: str, value: object) -> None:
    with pytest.raises(ReplyError):
        proof.Reply.read(json.dumps(plain.model_dump() | {field: value}).encode())


@pytest.mark.parametrize("path", ["text", "role"])
def test_a_repeated_key_is_refused_because_readers_differ_in_which_one_they_show(plain: proof.Reply, path: str) -> None:
    honest = plain.model_dump_json()
    assert proof.Reply.read(honest.encode()) == plain
    assert proof.Reply.read(json.dumps(plain.model_dump()).encode()) == plain, "a client may write it with spaces"
    double = honest.replace(f'"{path}":', f'"{path}":"a lie","{path}":', 1)
    with pytest.raises(ReplyError, match="repeated"):
        proof.Reply.read(double.encode())


def test_a_file_of_an_older_format_is_named(plain: proof.Reply) -> None:
    with pytest.raises(ReplyError, match="shoal-reply/1, and this version reads shoal-reply/2"):
        proof.Reply.read(plain.model_dump_json().replace("shoal-reply/2", "shoal-reply/1").encode())
