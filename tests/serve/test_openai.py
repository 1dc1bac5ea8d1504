"""The API as clients see it. The clients are plain HTTP requests and, if it is installed, OpenAI's Python client."""

import copy
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import web

from shoal.engine.torch_engine import TorchEngine
from shoal.serve.generation import TokenLogprobs
from shoal.serve.openai.responses import text_logprobs
from shoal.serve.scheduler import ServeLimits
from shoal.serve.service import Settings, _serve

from .support import DEADLINE_S, KEY, Running, engine, events, serving, until

MESSAGES = [{"role": "user", "content": "one and two"}]
WHY = "openai is not installed: pip install openai"


def text(running: Running, **params: Any) -> str:
    return str(running.chat(MESSAGES, **params).json()["choices"][0]["message"]["content"])


def test_the_official_client_can_list_models_chat_stream_and_complete(api: Running) -> None:
    openai = pytest.importorskip("openai", reason=WHY)
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [api.model]
        whole = client.chat.completions.create(model=api.model, messages=MESSAGES, seed=3, max_tokens=12, n=2)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert whole.usage.prompt_tokens > 11
        stream = client.chat.completions.create(model=api.model, messages=MESSAGES, seed=3, max_tokens=12, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == whole.choices[0].message.content
        completion = client.completions.create(model=api.model, prompt="one", max_tokens=4, temperature=0, logprobs=2)
        assert len(completion.choices[0].logprobs.token_logprobs) == completion.usage.completion_tokens
        with pytest.raises(openai.NotFoundError, match="GET /v1/models"):
            client.chat.completions.create(model="absent", messages=MESSAGES)
        message = whole.choices[0].message.model_dump()  # clients send a reply back with its null fields
    assert api.chat([*MESSAGES, message, *MESSAGES]).status_code == 200


def test_a_seed_repeats_its_text_and_other_seeds_give_other_texts(api: Running) -> None:
    texts = [text(api, seed=seed) for seed in (3, 3, 4, 5)]
    assert texts[0] == texts[1] and len(set(texts)) > 1
    negative = [text(api, seed=seed) for seed in (-1, -1, -(1 << 63), 1)]
    assert negative[0] == negative[1] and len(set(negative)) == 3


def test_a_stream_ends_with_its_finish_reason_and_then_usage(api: Running) -> None:
    chunks = events(api.chat(MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0


def test_the_pieces_of_several_streamed_choices_add_up_to_the_whole_response(api: Running) -> None:
    whole = [choice["message"]["content"] for choice in api.chat(MESSAGES, n=3).json()["choices"]]
    texts = ["", "", ""]
    for chunk in events(api.chat(MESSAGES, n=3, stream=True)):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == whole and len(set(whole)) > 1


def test_the_text_ends_before_a_stop_string(api: Running) -> None:
    whole = text(api, max_tokens=40, seed=11)
    assert len(whole) > 8
    stop = whole[4:7]
    choice = api.chat(MESSAGES, max_tokens=40, seed=11, stop=stop).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == whole[: whole.index(stop)]


def test_logprobs_list_the_sampled_tokens_and_the_likeliest(api: Running) -> None:
    response = api.chat(MESSAGES, logprobs=True, top_logprobs=3, temperature=0).json()
    tokens = response["choices"][0]["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 3 for token in tokens)
    # At temperature 0 each sampled token is the likeliest.
    assert all(token["top_logprobs"][0]["token"] == token["token"] for token in tokens)
    assert all(token["logprob"] <= 0 for token in tokens)


def test_a_tokens_logprob_has_the_same_bits_in_the_list_of_likeliest_tokens(api: Running) -> None:
    """lm-eval compares the two logprobs with == to see whether a continuation is greedy."""
    prompt = [list(range(4, 50))]
    response = api.complete(prompt=prompt, max_tokens=40, echo=True, logprobs=20, seed=1).json()
    logprobs = response["choices"][0]["logprobs"]
    rows = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]
    assert len(rows) > 60
    assert all(top[token] == logprob for token, logprob, top in rows)
    assert any(logprob == max(top.values()) for _, logprob, top in rows)
    chat = api.chat(MESSAGES, logprobs=True, top_logprobs=20, max_tokens=40).json()
    for token in chat["choices"][0]["logprobs"]["content"]:
        same = [top["logprob"] for top in token["top_logprobs"] if top["token"] == token["token"]]
        assert same in ([], [token["logprob"]])


def test_a_text_that_several_tokens_share_gets_the_logprob_of_the_likeliest() -> None:
    tokens = [TokenLogprobs(7, -3.0, ((5, -0.5), (6, -1.0))), TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.0)))]
    logprobs = text_logprobs(lambda token: "x" if token in (5, 6) else "y", tokens)
    assert logprobs["top_logprobs"] == [{"x": -0.5, "y": -3.0}, {"x": -0.5}]


def test_an_echoed_prompt_has_logprobs_with_and_without_a_completion(api: Running) -> None:
    params = {"prompt": [[5, 6, 7, 8]], "echo": True, "logprobs": 2, "temperature": 0}
    whole = api.complete(max_tokens=1, **params).json()["choices"][0]
    assert len(whole["logprobs"]["tokens"]) == 5
    assert whole["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in whole["logprobs"]["token_logprobs"][1:])
    alone = api.complete(max_tokens=0, **params).json()
    choice = alone["choices"][0]
    assert alone["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    for name, values in choice["logprobs"].items():
        assert values == whole["logprobs"][name][:4]
    assert whole["text"].startswith(choice["text"])
    assert events(api.complete(max_tokens=0, stream=True, **params))[0]["choices"][0] == choice
    refused = api.complete(max_tokens=0, **params | {"echo": False}).json()["error"]
    assert refused["param"] == "max_tokens" and "echo" in refused["message"]


@pytest.mark.parametrize("seed", [3, -1])
def test_a_reply_file_comes_with_the_response_and_verifies(api: Running, seed: int) -> None:
    [reply] = api.chat(MESSAGES, proof=True, seed=seed).json()["shoal"]["replies"]
    assert api.verify(reply).passed


@pytest.mark.parametrize(
    ("params", "status", "param"),
    [
        ({"top_p": 0.5}, 400, "top_p"),
        ({"top_k": 5}, 400, "top_k"),
        ({"min_p": 0.1}, 400, "min_p"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"functions": []}, 400, "functions"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "wet"}]}, 400, "messages"),
        ({"messages": [{"role": "assistant"}]}, 400, "messages"),
        ({"n": "2"}, 400, "n"),
        ({"temperature": 9}, 400, "temperature"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"target_length": 5}, 400, "as_trained"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_refusals_have_openais_shape(api: Running, params: dict[str, Any], status: int, param: str | None) -> None:
    response = api.chat(**{"messages": MESSAGES} | params)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (status, "invalid_request_error", param)


NEUTRAL = {
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "reasoning_effort": "none",
    "verbosity": "medium",
    "modalities": ["text"],
    "stream_options": {"include_usage": True},
    "user": "ada",
    "metadata": {"a": "b"},
    "logprobs": False,
    "top_logprobs": 0,
    "functions": None,
}


def test_neutral_values_change_nothing(api: Running) -> None:
    plain = api.chat(MESSAGES).json()["choices"]
    assert api.chat(MESSAGES, **NEUTRAL).json()["choices"] == plain
    assert api.chat(MESSAGES, **dict.fromkeys(NEUTRAL)).json()["choices"] == plain


def test_equal_prompts_of_one_request_give_equal_texts_only_if_the_request_has_a_seed(api: Running) -> None:
    params = {"prompt": ["one and two", "three", "one and two"], "max_tokens": 30}
    seeded = [choice["text"] for choice in api.complete(seed=4, **params).json()["choices"]]
    unseeded = [choice["text"] for choice in api.complete(**params).json()["choices"]]
    assert seeded[0] == seeded[2] != seeded[1]
    assert unseeded[0] != unseeded[2]


def test_a_message_part_that_is_not_text_is_named(api: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is this?"}, image]
    error = api.chat([{"role": "user", "content": content}]).json()["error"]
    assert error["message"].startswith("messages.0.content: a part of type 'image_url'")
    assert api.chat([{"role": "user", "content": content[:1]}]).status_code == 200


def test_only_the_request_with_a_token_that_the_model_lacks_fails(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, ids = copy.deepcopy(api.newest.tokenizer), api.newest.engine.model.config.vocab_size
    tokenizer.add_tokens([f"<more-{n}>" for n in range(len(tokenizer), ids + 1)])
    monkeypatch.setattr(api.newest, "tokenizer", tokenizer)
    for refused in (
        api.chat([{"role": "user", "content": f"<more-{ids}>"}]),
        api.complete(prompt=f"<more-{ids}>"),
        api.complete(prompt=[1, ids]),
        api.complete(prompt=[-1]),
    ):
        assert refused.status_code == 400 and f"0 to {ids - 1}" in refused.json()["error"]["message"]
    assert api.chat(MESSAGES).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/embeddings", 404, None),
        ("POST", "/v2/completions", 404, None),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET,HEAD"),
        ("POST", "/metrics", 405, "GET,HEAD"),
    ],
)
def test_unknown_paths_and_methods_give_errors_in_openais_shape(
    api: Running, method: str, path: str, status: int, allowed: str | None
) -> None:
    with api.api() as client:
        response = client.request(method, path)
    assert (response.status_code, response.headers.get("Allow")) == (status, allowed)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and f"{method} {path}" in error["message"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": KEY}])
def test_the_api_requires_a_key(api: Running, headers: dict[str, str]) -> None:
    response = httpx.get(f"{api.url}/v1/models", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


def test_health_is_503_until_the_model_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    loading = threading.Event()

    def slow_engine() -> TorchEngine:
        assert loading.wait(DEADLINE_S)
        return engine()

    with serving(tiny_folder, tmp_path, ready=False, new_engine=slow_engine) as running:
        with running.client() as client:
            try:
                health, response = client.get("/health"), running.chat(MESSAGES)
            finally:
                loading.set()
            until(lambda: client.get("/health").status_code == 200)
        assert (health.status_code, response.status_code) == (503, 503)
        assert response.headers["Retry-After"]


def test_a_request_with_more_completions_than_have_room_is_told_when_to_retry(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with serving(tiny_folder, tmp_path, limits=ServeLimits(rows=1, waiting=0)) as running:
        response = running.chat(MESSAGES, n=2)
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert running.chat(MESSAGES).status_code == 200


def test_a_client_that_disconnects_frees_its_rows(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, limits=ServeLimits(rows=1)) as running, running.api() as client:
        body = {"model": running.model, "messages": MESSAGES, "max_tokens": 480, "stream": True, "n": 16}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_bytes())
        until(lambda: running.service.scheduler.live == 0 and running.service.scheduler.waiting == 0)
        assert running.service.scheduler.counts.cancelled > 0


def test_metrics_count_generated_tokens(api: Running) -> None:
    api.chat(MESSAGES)
    lines = httpx.get(f"{api.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert float(values["shoal_serve_tokens_total"]) > 0
    assert float(values["shoal_serve_ready"]) == 1


@pytest.mark.usefixtures("ipv6")
async def test_the_urls_of_an_ipv6_server_have_brackets(tmp_path: Path) -> None:
    source, lines, stop = SimpleNamespace(name="tiny"), list[str](), threading.Event()
    service = SimpleNamespace(settings=Settings(tmp_path, "::1", 0), source=source, app=web.Application)
    stop.set()
    await _serve(service, stop, lines.append)  # type: ignore[arg-type]
    assert re.match(r"tiny at (http://\[::1\]:\d+) \(the page\) and \1/v1 \(the API\)$", lines[0])
