"""Replies whose form is forced: JSON, JSON of a schema, calls of tools; by a random model that would write none of it."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shoal.model.load import save_model

from .support import Running, serving
from .test_tools import ASKED, TAGS, WEATHER

WHY = "llguidance is not installed: pip install 'shoal[guided]'"
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"type": "integer", "minimum": 1800, "maximum": 1999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
TIME = {"type": "function", "function": {"name": "time"}}
# The parameters allow no long texts, so that a random model ends its call.
RAIN = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def guided(make_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One token a byte."""
    pytest.importorskip("llguidance", reason=WHY)
    specials = ["<pad>", "<eos>", "<user>", "<assistant>", "<tool>", "<system>"]
    vocab = {token: id for id, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    template = (
        "{% if tools %}<system>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<eos>{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
        + TAGS
        + "{% endfor %}"
        "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=specials[2:],
        chat_template=template,
    )
    folder = tmp_path_factory.mktemp("guided")
    save_model(make_tiny(0, vocab_size=320, max_position_embeddings=2048), tokenizer, folder / "model")
    with serving(folder / "model", folder / "serve") as running:
        yield running


def ask(running: Running, **asked: Any) -> Any:
    body = {"model": running.model, "messages": ASKED, "max_tokens": 200, "seed": 1} | asked
    with running.api() as client:
        return client.post("/v1/chat/completions", json=body)


def schema(of: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of, **more}}


def test_every_reply_fits_its_schema_and_the_seed_still_decides(guided: Running) -> None:
    asked = {"response_format": schema(PERSON, strict=True), "n": 4, "logprobs": True}
    choices = ask(guided, **asked).json()["choices"]
    people = [json.loads(choice["message"]["content"]) for choice in choices]
    assert all(set(one) == {"name", "born"} and one["name"] in ("Ada", "Grace") for one in people)
    assert all(1800 <= one["born"] <= 1999 for one in people) and len({one["born"] for one in people}) > 1
    assert all(choice["finish_reason"] == "stop" for choice in choices)
    assert ask(guided, **asked).json()["choices"] == choices


def test_rows_with_and_without_a_schema_share_a_step(guided: Running) -> None:
    plain = ask(guided, max_tokens=30).json()["choices"]
    body = {"model": guided.model, "messages": ASKED, "max_tokens": 30, "seed": 1, "stream": True}
    with guided.api() as client, client.stream("POST", "/v1/chat/completions", json=body) as other:
        json.loads(ask(guided, response_format=schema(PERSON)).json()["choices"][0]["message"]["content"])
        chunks = [json.loads(line[6:]) for line in other.iter_lines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == plain[0]["message"]["content"]


def test_json_mode_writes_an_object_or_the_beginning_of_one(guided: Running) -> None:
    for seed in range(3):
        choice = ask(guided, response_format={"type": "json_object"}, seed=seed, max_tokens=60).json()["choices"][0]
        text = choice["message"]["content"]
        assert text.startswith("{")
        assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_is_forced(guided: Running, choice: Any, stream: bool) -> None:
    answer = ask(guided, tools=[RAIN], tool_choice=choice, parallel_tool_calls=False, stream=stream)
    assert answer.status_code == 200, answer.text
    if stream:
        lines = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
        calls = [call for line in lines for call in line["delta"].get("tool_calls", [])]
        reason = lines[-1]["finish_reason"]
    else:
        found = answer.json()["choices"][0]
        calls, reason = found["message"]["tool_calls"], found["finish_reason"]
    assert [call["function"]["name"] for call in calls] == ["weather"] and reason == "tool_calls"
    assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_named_function_is_the_one_that_is_called(guided: Running) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(3):
        message = ask(guided, tools=[TIME, RAIN], tool_choice=named, seed=seed).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize(
    "wrong", [{"type": "nothing"}, {"$ref": "#/absent"}, {"type": "string", "pattern": "("}, {"allOf": 3}]
)
def test_a_schema_that_cannot_be_followed_is_refused(guided: Running, wrong: Any) -> None:
    answer = ask(guided, response_format=schema(wrong))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"


def test_a_server_without_the_library_names_it(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = ask(api, response_format={"type": "json_object"})
    assert answer.status_code == 400 and "shoal[guided]" in answer.json()["error"]["message"]


def test_strict_goes_with_a_call_that_is_forced(guided: Running) -> None:
    strict = {"type": "function", "function": RAIN["function"] | {"strict": True}}
    assert ask(guided, tools=[strict]).json()["error"]["param"] == "tools"
    asked = {"tool_choice": "required", "parallel_tool_calls": False}
    assert ask(guided, tools=[strict], **asked).status_code == 200
    assert ask(guided, tools=[WEATHER], tool_choice="none", max_tokens=1).status_code == 200
