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
from shoal.serve.openai.forms import Form
from shoal.serve.openai.requests import RequestError
from shoal.serve.openai.tools import Call, Reading, form_of
from shoal.serve.text import Text, replay

from .support import KEY, Running, serving

TAGS = "<tool_call>\n{{ call.function | tojson }}\n</tool_call>\n"
FORMS = {
    "tags": (TAGS, Form("<tool_call>", "</tool_call>", "name", "arguments")),
    "list in tags": (
        "<tool_call>[{{ call.function | tojson }}]</tool_call>",
        Form("<tool_call>", "</tool_call>", "name", "arguments"),
    ),
    "bare": (
        '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}',
        Form("", "", "name", "parameters"),
    ),
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASKED = [{"role": "user", "content": "is it raining?"}]
ROME, OSLO = (json.dumps({"name": "weather", "arguments": {"city": city}}) for city in ("Rome", "Oslo"))
TAGGED = Form("<tool_call>", "</tool_call>", "name", "arguments")


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


def parts(form: Form, pieces: list[str], tool: dict[str, Any] = WEATHER) -> list[Any]:
    """Texts as strings, put together, and calls as (name, arguments)."""
    reading = Reading(form, [tool])
    found = [part for piece in pieces for part in reading.add(piece)] + reading.end()
    told: list[Any] = []
    for part in found:
        if isinstance(part, Call):
            told.append((part.name, json.loads(part.arguments)))
        elif told and isinstance(told[-1], str):
            told[-1] += part
        else:
            told.append(part)
    return told


@pytest.mark.parametrize("kind", FORMS)
def test_how_calls_are_written_is_read_from_the_template(kind: str) -> None:
    call, form = FORMS[kind]
    assert form_of(tokenizer(call)) == form


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("", "not read here"),
        ("<call {{ call.function.name }}>{{ call.function.arguments.probekey }}", "not read here"),
    ],
)
def test_a_template_whose_calls_cannot_be_read_is_refused(call: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        form_of(tokenizer(call))


PAIRS = "{% for key, value in call.function.arguments.items() %}"
OPEN, CLOSE = "{{ '{' }}", "{{ '}' }}"
NAME, JSON = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
CALLS = "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
CALLED = "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"
GIVEN = {"city": "Rome", "days": 3, "note": "3", "wet": True, "at": {"a": [1, "x"]}}
SHAPED = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "wet": {"type": "boolean"},
                "at": {"type": "object"},
            },
        },
    },
}
CODED = (
    "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=note>\n3\n"
    '</parameter>\n<parameter=wet>\nTrue\n</parameter>\n<parameter=at>\n{"a": [1, "x"]}\n</parameter>\n</function>\n'
)
INVOKED = (
    'weather">\n<{0}parameter name="city">Rome</{0}parameter>\n<{0}parameter name="days">3</{0}parameter>'
    '<{0}parameter name="note" string="true">3</{0}parameter><{0}parameter name="wet">true</{0}parameter>'
    '<{0}parameter name="at">{{"a": [1, "x"]}}</{0}parameter>\n</{0}invoke>'
)
WRITTEN = 'city="Rome", days=3, note=\'3\', wet=True, at={"a": [1, "x"]}'
QUOTED = "city:<q>Rome<q>,days:3,note:<q>3<q>,wet:true,at:{a:[1,<q>x<q>]}"
# By family: how the template writes a call, and a reply with two calls of `GIVEN`, as such a model writes it.
NOTATIONS = {
    "Qwen3-Coder and Qwen3.5": (
        f"<tool_call>\n<function={NAME}>\n{PAIRS}<parameter={{{{ key }}}}>\n{{{{ value }}}}\n</parameter>\n{{% endfor %}}"
        "</function>\n</tool_call>",
        f"<tool_call>\n{CODED}</tool_call>\n<tool_call>{CODED}</tool_call>",
    ),
    "Seed-OSS": (
        f"<seed:tool_call>\n<function={NAME}>\n{PAIRS}<parameter={{{{ key }}}}>{{{{ value }}}}</parameter>\n{{% endfor %}}"
        "</function>\n</seed:tool_call>",
        f"<seed:tool_call>\n{CODED}</seed:tool_call>" * 2,
    ),
    "GLM-4.5": (
        f"\n<tool_call>{NAME}\n{PAIRS}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{{{{ value }}}}</arg_value>\n"
        "{% endfor %}</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key><arg_value>3"
        "</arg_value>\n<arg_key>note</arg_key>\n<arg_value>3</arg_value>\n<arg_key>wet</arg_key>\n<arg_value>true</arg_value>"
        '\n<arg_key>at</arg_key>\n<arg_value>{"a": [1, "x"]}</arg_value>\n</tool_call>\n' * 2,
    ),
    "gpt-oss": (
        f"<|start|>assistant to=functions.{NAME}<|channel|>commentary json<|message|>{JSON}<|call|>",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>GIVEN<|call|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>GIVEN",
    ),
    "Gemma 4": (
        f'<|tool_call>call:{NAME}{OPEN}{PAIRS}{{{{ key }}}}:<|"|>{{{{ value }}}}<|"|>{{% endfor %}}{CLOSE}<tool_call|>',
        f"<|tool_call>call:weather{{{QUOTED}}}<tool_call|>".replace("<q>", '<|"|>') * 2,
    ),
    "FunctionGemma": (
        f"<start_function_call>call:{NAME}{OPEN}{PAIRS}{{{{ key }}}}:<escape>{{{{ value }}}}<escape>{{% endfor %}}{CLOSE}"
        "<end_function_call>",
        f"<start_function_call>call:weather{{{QUOTED}}}<end_function_call>".replace("<q>", "<escape>") * 2,
    ),
    "Mistral": (f"[TOOL_CALLS]{NAME}[ARGS]{JSON}", "[TOOL_CALLS]weather[ARGS]GIVEN[TOOL_CALLS]weatherGIVEN"),
    "Mistral, a list": (
        "{% if loop.first %}[TOOL_CALLS] [{% endif %}{{ call.function | tojson }}{% if loop.last %}]{% endif %}",
        '[TOOL_CALLS][{"name": "weather", "arguments": GIVEN}, {"arguments": GIVEN, "name": "weather", "id": "123456789"}]',
    ),
    "DeepSeek V3": (
        f"{CALLS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{{{{ call.function.arguments + '' }}}}\n```"
        f"<｜tool▁call▁end｜>{CALLED}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\nGIVEN\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\nGIVEN\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "DeepSeek V3.1": (
        f"{CALLS}<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>{CALLED}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>GIVEN<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>GIVEN<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "DeepSeek V3.2": (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{NAME}">\n{PAIRS}<｜DSML｜parameter name="{{{{ key }}}}" '
        'string="true">{{ value }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "<｜DSML｜function_calls>\n"
        + f'<｜DSML｜invoke name="{INVOKED.format("｜DSML｜")}\n' * 2
        + "</｜DSML｜function_calls>",
    ),
    "MiniMax M2": (
        f'<minimax:tool_call>\n<invoke name="{NAME}">\n{PAIRS}<parameter name="{{{{ key }}}}">{{{{ value }}}}</parameter>\n'
        "{% endfor %}</invoke>\n</minimax:tool_call>",
        "<minimax:tool_call>\n" + f'<invoke name="{INVOKED.format("")}\n' * 2 + "</minimax:tool_call>",
    ),
    "Kimi K2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>GIVEN<|tool_call_end|>"
        "<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>GIVEN<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "Hermes and Qwen2.5": (
        TAGS,
        '<tool_call>\n{"name": "weather", "arguments": GIVEN}\n</tool_call>\n' * 2,
    ),
    "Llama 3.1, tags": (f"<function={NAME}>{JSON}</function>", "<function=weather>GIVEN</function>\n" * 2),
    "LFM2": (
        f'<|tool_call_start|>[{NAME}({PAIRS}{{{{ key }}}}="{{{{ value }}}}"{{% endfor %}})]<|tool_call_end|>',
        f"<|tool_call_start|>[weather({WRITTEN}), weather({WRITTEN})]<|tool_call_end|>",
    ),
    "Gemma 3": (
        f"```tool_code\n{NAME}({PAIRS}{{{{ key }}}}='{{{{ value }}}}'{{% endfor %}})\n```",
        f"```tool_code\nweather({WRITTEN})\nweather({WRITTEN})\n```",
    ),
    "OLMo 3": (
        f'<function_calls>\n{NAME}({PAIRS}{{{{ key }}}}="{{{{ value }}}}"{{% endfor %}})\n</function_calls>',
        f"<function_calls>\nweather({WRITTEN})\nweather({WRITTEN})\n</function_calls>",
    ),
    "Llama 4": (
        f"[{NAME}({PAIRS}{{{{ key }}}}={{{{ value }}}}{{% endfor %}})]",
        f"[weather({WRITTEN.replace('True', 'true')}), weather({WRITTEN})]",
    ),
    "Phi-4-mini and Granite 3": ("", '<|tool_call|>[{"name": "weather", "arguments": GIVEN}]<|/tool_call|>' * 2),
}


def form_by(kind: str) -> Form:
    made = tokenizer(NOTATIONS[kind][0])
    if not NOTATIONS[kind][0]:
        made.add_special_tokens({"extra_special_tokens": ["<|tool_call|>", "<|/tool_call|>"]})
    return form_of(made)


@pytest.mark.parametrize("kind", NOTATIONS)
def test_the_calls_of_each_family_are_read(kind: str) -> None:
    form, text = form_by(kind), NOTATIONS[kind][1].replace("GIVEN", json.dumps(GIVEN))
    calls = [("weather", GIVEN)] * 2
    bare = not form.before
    for before in ("", "I look.\n") if not bare else ("",):
        told = ([before.rstrip()] if before else []) + calls
        assert parts(form, [before + text], SHAPED) == told
        assert parts(form, list(before + text), SHAPED) == told
    wrong = text.replace("weather", "whether")
    assert not [part for part in parts(form, list(wrong), SHAPED) if not isinstance(part, str)]


@pytest.mark.parametrize("kind", NOTATIONS)
def test_a_call_that_is_cut_stays_text(kind: str) -> None:
    form, text = form_by(kind), NOTATIONS[kind][1].replace("GIVEN", json.dumps(GIVEN))
    cut = text[: text.index("Rome") + 2]
    assert [part for part in parts(form, list(cut), SHAPED) if not isinstance(part, str)] == []


def test_control_tokens_that_mark_calls_are_read_and_others_are_no_text() -> None:
    made = tokenizer("<tool>{{ call.function | tojson }}</tool>")
    form = form_of(made)
    assert form.shown == {made.convert_tokens_to_ids("<tool>")}
    ids = [*made.encode(f"so <tool>{ROME}</tool>", add_special_tokens=False), made.convert_tokens_to_ids("<user>")]
    text = replay(Text(made, shown=form.shown), ids)
    assert parts(form, [text]) == ["so", ("weather", {"city": "Rome"})]
    assert "<tool>" not in replay(Text(made), ids)


def test_one_call_is_given_where_they_must_not_be_parallel() -> None:
    text = f"<tool_call>{ROME}</tool_call><tool_call>[{OSLO}, {ROME}]</tool_call>"
    reading = Reading(TAGGED, [WEATHER], parallel=False)
    found = reading.add(text) + reading.end()
    assert [json.loads(part.arguments) for part in found if isinstance(part, Call)] == [{"city": "Rome"}]


@pytest.mark.parametrize(
    "text", ["f(x)", "f(**{})", "[f(a={1, 2})]", "import os", "f(a=1)(b=2)", "f(a=1+1)", "[" * 500, "f(a=1e999)"]
)
def test_python_that_is_no_plain_call_stays_text(text: str) -> None:
    form = Form("<|tool_call_start|>", "<|tool_call_end|>", kind="python")
    reading = Reading(form, [{"function": {"name": "f"}}])
    marked = f"<|tool_call_start|>{text}<|tool_call_end|>"
    assert reading.add(marked) + reading.end() == ["<|tool_call_start|>", text + "<|tool_call_end|>"]


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
            Form("", "", "name", "parameters"),
            ROME.replace("arguments", "parameters"),
            [("weather", {"city": "Rome"})],
        ),
        (Form("", "", "name", "parameters"), "the set {1, 2}", ["the set {1, 2}"]),
    ],
)
def test_text_and_calls_are_told_apart_wherever_the_pieces_end(form: Form, text: str, told: list[Any]) -> None:
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
