"""Tools: how a template writes calls, what is a call in a reply and what stays text, and the public client."""

import json
import string
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shoal.engine import batch
from shoal.model.load import save_model
from shoal.serve import proof
from shoal.serve.errors import RequestError
from shoal.serve.openai.tools import CallFormat, CallReader, WrittenCall, detect_call_format
from shoal.serve.text import Text, replay

from .support import KEY, Running, serving

TAGS = "<tool_call>\n{{ call.function | tojson }}\n</tool_call>\n"
FORMS = {
    "tags": (TAGS, CallFormat("<tool_call>", "</tool_call>", "name", "arguments")),
    "list in tags": (
        "<tool_call>[{{ call.function | tojson }}]</tool_call>",
        CallFormat("<tool_call>", "</tool_call>", "name", "arguments"),
    ),
    "bare": (
        '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}',
        CallFormat("", "", "name", "parameters"),
    ),
    "Mistral's list": (
        "{% if loop.first %}[TOOL_CALLS] [{% endif %}{{ call.function | tojson }}{% if loop.last %}]{% endif %}",
        CallFormat("[TOOL_CALLS]", "", "name", "arguments"),
    ),
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASKED = [{"role": "user", "content": "is it raining?"}]
ROME, OSLO = (json.dumps({"name": "weather", "arguments": {"city": city}}) for city in ("Rome", "Oslo"))
TAGGED = CallFormat("<tool_call>", "</tool_call>", "name", "arguments")


def tokenizer(call: str = TAGS) -> PreTrainedTokenizerFast:
    """One token a character; its template writes calls like this."""
    specials = ["<pad>", "<eos>", "<user>", "<assistant>", "<tool>", "<system>"]
    vocab = {token: index for index, token in enumerate([*specials, *string.printable])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    template = (
        "{% if tools %}<system>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<eos>{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}" + call + "{% endfor %}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=specials[2:],
        chat_template=template,
    )


@pytest.fixture(scope="module")
def caller(make_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tools")
    save_model(make_tiny(0, vocab_size=128, max_position_embeddings=2048), tokenizer(), folder / "model")
    with serving(folder / "model", folder / "serve") as running:
        yield running


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the model write a given text, and then end."""

    def write(text: str) -> None:
        ids = [*tokenizer().encode(text, add_special_tokens=False), 1]

        def chosen(scaled: Any, seeds: Any, positions: Any, temperature: float) -> Any:
            tokens_N = torch.tensor([ids[min(position, len(ids) - 1)] for position in positions])
            return tokens_N, torch.zeros(len(tokens_N))

        monkeypatch.setattr(batch, "choose", chosen)

    return write


def parts(form: CallFormat, pieces: list[str], tool: dict[str, Any] = WEATHER) -> list[Any]:
    """Texts as strings, put together, and calls as (name, arguments)."""
    reading = CallReader(form, [tool])
    found = [part for piece in pieces for part in reading.add(piece)] + reading.end()
    told: list[Any] = []
    for part in found:
        if isinstance(part, WrittenCall):
            told.append((part.name, json.loads(part.arguments)))
        elif told and isinstance(told[-1], str):
            told[-1] += part
        else:
            told.append(part)
    return told


@pytest.mark.parametrize("kind", FORMS)
def test_how_calls_are_written_is_read_from_the_template(kind: str) -> None:
    call, form = FORMS[kind]
    assert detect_call_format(tokenizer(call)) == form


@pytest.mark.parametrize(
    "call",
    [
        "",
        "<call {{ call.function.name }}>{{ call.function.arguments.probekey }}",
        "<|tool_call_start|>[{{ call.function.name }}(probekey='probevalue')]<|tool_call_end|>",
    ],
)
def test_a_template_whose_calls_are_no_json_is_refused_unless_the_call_is_forced(call: str) -> None:
    with pytest.raises(RequestError, match="as JSON objects"):
        detect_call_format(tokenizer(call))
    assert detect_call_format(tokenizer(call), is_forced=True) == CallFormat("", "")


def test_control_tokens_that_mark_calls_are_read_and_others_are_no_text() -> None:
    made = tokenizer("<tool>{{ call.function | tojson }}</tool>")
    form = detect_call_format(made)
    assert form.shown == {made.convert_tokens_to_ids("<tool>")}
    ids = [*made.encode(f"so <tool>{ROME}</tool>", add_special_tokens=False), made.convert_tokens_to_ids("<user>")]
    text = replay(Text(made, shown=form.shown), ids)
    assert parts(form, [text]) == ["so", ("weather", {"city": "Rome"})]
    assert "<tool>" not in replay(Text(made), ids)


def test_one_call_is_given_where_they_must_not_be_parallel() -> None:
    text = f"<tool_call>{ROME}</tool_call><tool_call>[{OSLO}, {ROME}]</tool_call>"
    reading = CallReader(TAGGED, [WEATHER], parallel=False)
    found = reading.add(text) + reading.end()
    assert [json.loads(part.arguments) for part in found if isinstance(part, WrittenCall)] == [{"city": "Rome"}]


@pytest.mark.parametrize(
    ("form", "text", "told"),
    [
        (
            TAGGED,
            f"Let me see.\n<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{OSLO}\n</tool_call>",
            ["Let me see.", ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})],
        ),
        (
            TAGGED,
            f"<tool_call>[{ROME}, {OSLO}]</tool_call> and more",
            [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}), " and more"],
        ),
        (TAGGED, f"<tool_call>{ROME}", [("weather", {"city": "Rome"})]),  # it ended before the closing tag
        (TAGGED, "1 < 2, <tool and [tools", ["1 < 2, <tool and [tools"]),
        (TAGGED, "spaces stay  \n", ["spaces stay  \n"]),
        (
            CallFormat("", "", "name", "parameters"),
            ROME.replace("arguments", "parameters"),
            [("weather", {"city": "Rome"})],
        ),
        (CallFormat("", "", "name", "parameters"), "the set {1, 2}", ["the set {1, 2}"]),
    ],
)
def test_text_and_calls_are_told_apart_wherever_the_pieces_end(form: CallFormat, text: str, told: list[Any]) -> None:
    assert parts(form, [text]) == told
    assert parts(form, list(text)) == told
    assert all(parts(form, [text[:cut], text[cut:]]) == told for cut in range(len(text)))


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "weather", "arguments": {"city": ',
        '{"name": "weather"}',
        '{"name": "weather", "arguments": "Rome"}',
        '{"name": "weather", "arguments": {"t": NaN}}',
        '{"name": "weather", "arguments": {"t": 1e999}}',
        '{"name": "format_disk", "arguments": {}}',
        "[]",
        "[" * 5000,
        f"{ROME} and so on",
    ],
)
def test_what_is_no_whole_call_of_an_offered_function_stays_text(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert parts(TAGGED, [text]) == [text]
    assert parts(TAGGED, [text + f"<tool_call>{OSLO}</tool_call>"])[-1] == ("weather", {"city": "Oslo"})


def test_the_public_client_calls_a_tool_and_gives_its_result_back(caller: Running, writes: Any) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    writes(f"I look.\n<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{OSLO}\n</tool_call>")
    with openai.OpenAI(base_url=f"{caller.url}/v1", api_key=KEY, max_retries=0) as client:
        asked = {"model": caller.model, "messages": ASKED, "tools": [WEATHER]}
        choice = client.chat.completions.create(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
        assert len({call.id for call in calls}) == 2

        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            last = stream.get_final_completion().choices[0]
        assert (last.finish_reason, last.message.content) == ("tool_calls", "I look.")
        assert [call.function.arguments for call in last.message.tool_calls] == [c.function.arguments for c in calls]

        told = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in calls]
        writes("It rains.")
        after = client.chat.completions.create(
            model=caller.model, messages=[*ASKED, choice.message, *told], tools=[WEATHER], extra_body={"proof": True}
        )
        assert (after.choices[0].finish_reason, after.choices[0].message.content) == ("stop", "It rains.")
        assert after.choices[0].message.tool_calls is None
        prompt = tokenizer().decode(after.model_extra["shoal"]["replies"][0]["prompt"])
        assert f"<tool_call>\n{ROME}\n</tool_call>" in prompt and prompt.count("<tool>wet<eos>") == 2


def test_without_tools_a_call_is_text(caller: Running, writes: Any) -> None:
    writes(f"<tool_call>{ROME}</tool_call>")
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = post(caller, **more).json()["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"].startswith("<tool_call>")


def test_a_reply_with_tools_is_recomputed_with_these_tools(caller: Running) -> None:
    found = post(caller, proof=True, tools=[WEATHER], max_tokens=8, seed=2).json()["shoal"]["replies"][0]
    held = caller.service.versions.newest
    assert held is not None and found["tools"] == [WEATHER]
    assert proof.verify(proof.Reply.read(json.dumps(found).encode()), held).passed
    other = json.loads(json.dumps(found).replace("city", "town"))
    assert not proof.verify(proof.Reply.read(json.dumps(other).encode()), held).passed


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "proof": True}, "proof"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools"),
        ({"messages": [{"role": "tool", "content": "wet"}]}, "messages"),
        ({"messages": [{"role": "assistant"}]}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": "[]"}}],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_what_would_be_ignored_is_refused_in_openais_shape(
    caller: Running, changed: dict[str, Any], param: str
) -> None:
    response = post(caller, **changed)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["type"], response.json()["error"]["param"]) == ("invalid_request_error", param)


def test_a_model_without_tools_says_so(api: Running) -> None:
    error = post(api, tools=[WEATHER]).json()["error"]
    assert error["param"] == "tools" and "chat template has none" in error["message"]


def post(running: Running, **asked: Any) -> Any:
    body = {"model": running.model, "messages": ASKED, "max_tokens": 200} | asked
    with running.api() as client:
        return client.post("/v1/chat/completions", json=body)
