"""The API as its clients see it: the public client where it is installed, raw requests for the rest."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.engine.torch_engine import TorchEngine
from shoal.serve import proof
from shoal.serve.generation import TokenLogprobs
from shoal.serve.openai.answers import text_logprobs
from shoal.serve.scheduler import ServeLimits

from .support import DEADLINE_S, KEY, Running, engine, serving, until

ASKED = [{"role": "user", "content": "one and two"}]


def chat(running: Running, **asked: Any) -> httpx.Response:
    body = {"model": running.model, "messages": ASKED, "max_tokens": 12, "seed": 3} | asked
    with running.api() as client:
        return client.post("/v1/chat/completions", json=body)


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_public_client_lists_chats_streams_and_completes(api: Running) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [api.model]
        whole = client.chat.completions.create(model=api.model, messages=ASKED, seed=3, max_tokens=12, n=2)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert whole.usage.prompt_tokens > 11
        stream = client.chat.completions.create(model=api.model, messages=ASKED, seed=3, max_tokens=12, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == whole.choices[0].message.content
        text = client.completions.create(model=api.model, prompt="one", max_tokens=4, temperature=0, logprobs=2)
        assert len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens
        with pytest.raises(openai.NotFoundError, match="GET /v1/models"):
            client.chat.completions.create(model="absent", messages=ASKED)


def test_a_seed_gives_the_same_text_again_and_other_seeds_others(api: Running) -> None:
    texts = [chat(api, seed=seed).json()["choices"][0]["message"]["content"] for seed in (3, 3, 4, 5)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_a_stream_ends_with_its_reason_and_then_usage(api: Running) -> None:
    chunks = streamed(chat(api, stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0


def test_the_pieces_of_several_streamed_choices_add_up_to_the_whole_answer(api: Running) -> None:
    whole = [choice["message"]["content"] for choice in chat(api, n=3).json()["choices"]]
    texts = ["", "", ""]
    for chunk in streamed(chat(api, n=3, stream=True)):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == whole and len(set(whole)) > 1


def test_a_stop_string_ends_the_text_before_itself(api: Running) -> None:
    whole = chat(api, max_tokens=40, seed=11).json()["choices"][0]["message"]["content"]
    assert len(whole) > 8
    stop = whole[4:7]
    choice = chat(api, max_tokens=40, seed=11, stop=stop).json()["choices"][0]
    assert choice == choice | {"finish_reason": "stop"}
    assert choice["message"]["content"] == whole[: whole.index(stop)]


def test_logprobs_are_of_the_sampled_tokens_with_the_likeliest_beside_them(api: Running) -> None:
    found = chat(api, logprobs=True, top_logprobs=3, temperature=0).json()["choices"][0]["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 3 for token in found)
    assert all(token["top_logprobs"][0]["token"] == token["token"] for token in found)  # greedy takes the likeliest
    assert all(token["logprob"] <= 0 for token in found)


def test_a_tokens_own_logprob_has_the_bits_of_its_entry_among_the_likeliest(api: Running) -> None:
    """lm-eval compares them with == to see whether a continuation is greedy."""
    body = {
        "model": api.model,
        "prompt": [list(range(4, 50))],
        "max_tokens": 40,
        "echo": True,
        "logprobs": 20,
        "seed": 1,
    }
    with api.api() as client:
        found = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    rows = list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[1:]
    assert len(rows) > 60
    assert all(top[token] == logprob for token, logprob, top in rows)
    assert any(logprob == max(top.values()) for _, logprob, top in rows)
    chatted = chat(api, logprobs=True, top_logprobs=20, max_tokens=40).json()["choices"][0]["logprobs"]["content"]
    for token in chatted:
        same = [one["logprob"] for one in token["top_logprobs"] if one["token"] == token["token"]]
        assert same in ([], [token["logprob"]])


def test_of_tokens_with_the_same_text_the_likeliest_has_its_logprob() -> None:
    tokens = [TokenLogprobs(7, -3.0, ((5, -0.5), (6, -1.0))), TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.0)))]
    found = text_logprobs(lambda token: "x" if token in (5, 6) else "y", tokens)
    assert found["top_logprobs"] == [{"x": -0.5, "y": -3.0}, {"x": -0.5}]


def test_an_echoed_prompt_has_logprobs_from_its_second_token_on(api: Running) -> None:
    body = {"model": api.model, "prompt": [[5, 6, 7, 8]], "max_tokens": 1, "echo": True, "logprobs": 1}
    with api.api() as client:
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 5
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])


def test_a_reply_file_comes_with_the_answer_and_verifies(api: Running) -> None:
    found = chat(api, proof=True).json()["shoal"]["replies"][0]
    reply = proof.Reply.read(json.dumps(found).encode())
    held = api.service.versions.newest
    assert held is not None and proof.verify(reply, held).passed


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"top_p": 0.5}, 400, "top_p"),
        ({"top_k": 5}, 400, "top_k"),
        ({"min_p": 0.1}, 400, "min_p"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"functions": []}, 400, "functions"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"n": "2"}, 400, "n"),
        ({"temperature": 9}, 400, "temperature"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"target_length": 5}, 400, "as_trained"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_refusals_have_openais_shape(api: Running, changed: dict[str, Any], status: int, param: str | None) -> None:
    response = chat(api, **changed)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["param"] == param


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


def test_values_that_change_nothing_change_nothing(api: Running) -> None:
    plain = chat(api).json()["choices"]
    assert chat(api, **NEUTRAL).json()["choices"] == plain
    assert chat(api, **dict.fromkeys(NEUTRAL)).json()["choices"] == plain


def test_a_negative_seed_is_a_seed(api: Running) -> None:
    texts = [chat(api, seed=seed).json()["choices"][0]["message"]["content"] for seed in (-1, -1, -(1 << 63), 1)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    reply = chat(api, seed=-1, proof=True).json()["shoal"]["replies"][0]
    held = api.service.versions.newest
    assert held is not None and proof.verify(proof.Reply.read(json.dumps(reply).encode()), held).passed


def test_a_prompt_is_scored_without_a_completion(api: Running) -> None:
    body = {"model": api.model, "prompt": [[5, 6, 7, 8]], "echo": True, "logprobs": 2, "temperature": 0}
    with api.api() as client:
        whole = client.post("/v1/completions", json=body | {"max_tokens": 1}).json()["choices"][0]
        alone = client.post("/v1/completions", json=body | {"max_tokens": 0}).json()
        lines = client.post("/v1/completions", json=body | {"max_tokens": 0, "stream": True})
        refused = client.post("/v1/completions", json=body | {"max_tokens": 0, "echo": False}).json()["error"]
    choice = alone["choices"][0]
    assert alone["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    for name, values in choice["logprobs"].items():
        assert values == whole["logprobs"][name][:4]
    assert whole["text"].startswith(choice["text"])
    assert streamed(lines)[0]["choices"][0] == choice
    assert refused["param"] == "max_tokens" and "echo" in refused["message"]


def test_equal_prompts_of_one_request_get_equal_texts_if_it_names_a_seed(api: Running) -> None:
    body = {"model": api.model, "prompt": ["one and two", "three", "one and two"], "max_tokens": 30}
    with api.api() as client:
        seeded = [
            choice["text"] for choice in client.post("/v1/completions", json=body | {"seed": 4}).json()["choices"]
        ]
        unseeded = [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]
    assert seeded[0] == seeded[2] != seeded[1]
    assert unseeded[0] != unseeded[2]


def test_a_part_that_is_no_text_is_named(api: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is this?"}, image]
    error = chat(api, messages=[{"role": "user", "content": content}]).json()["error"]
    assert error["message"].startswith("messages.0.content: a part of type 'image_url'")
    assert chat(api, messages=[{"role": "user", "content": content[:1]}]).status_code == 200


def test_an_answer_may_be_sent_back_with_all_its_fields(api: Running) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=KEY, max_retries=0) as client:
        said = client.chat.completions.create(model=api.model, messages=ASKED, max_tokens=4).choices[0].message
    assert chat(api, messages=[*ASKED, said.model_dump(), *ASKED]).status_code == 200


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
def test_unknown_paths_and_methods_are_refused_in_openais_shape(
    api: Running, method: str, path: str, status: int, allowed: str | None
) -> None:
    with api.api() as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.headers.get("Allow")) == (status, allowed)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and f"{method} {path}" in error["message"]


def test_only_a_key_opens_the_api(api: Running) -> None:
    with api.client() as client:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": KEY}):
            response = client.get("/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


def test_health_is_503_until_the_model_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    loading = threading.Event()

    def slow_engine() -> TorchEngine:
        assert loading.wait(DEADLINE_S)
        return engine()

    with serving(tiny_folder, tmp_path, ready=False, new_engine=slow_engine) as running:
        with running.api() as client:
            try:
                health, asked = client.get("/health"), chat(running)
            finally:
                loading.set()
            until(lambda: client.get("/health").status_code == 200)
        assert (health.status_code, asked.status_code) == (503, 503)
        assert asked.headers["Retry-After"]


def test_beyond_rows_and_queue_a_request_is_told_when_to_come_back(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, limits=ServeLimits(rows=1, waiting=0)) as running:
        response = chat(running, n=2)
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert chat(running).status_code == 200


def test_who_leaves_frees_the_row(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, limits=ServeLimits(rows=1)) as running, running.api() as client:
        body = {"model": running.model, "messages": ASKED, "max_tokens": 480, "stream": True, "n": 16}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_bytes())
        until(lambda: running.service.scheduler.live == 0 and running.service.scheduler.waiting == 0)
        assert running.service.scheduler.counts.cancelled > 0


def test_metrics_count_what_was_generated(api: Running) -> None:
    chat(api)
    with api.client() as client:
        lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["shoal_serve_tokens_total"]) > 0
    assert float(lines["shoal_serve_ready"]) == 1
