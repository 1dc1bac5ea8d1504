"""lm-eval's API models as clients of the endpoint: logprobs of given continuations, generation, and a whole task."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.model.load import load_model, load_tokenizer

from .support import KEY, Running, serving

pytestmark = pytest.mark.slow
WHY = "lm_eval is not installed: pip install 'shoal[evals]'"
TASK = """
task: shoal_letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" a", " b"]
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
QUESTIONS = ["one", "two and", "3 + 4", "so", "why not"]


def client(running: Running, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("lm_eval", reason=WHY)
    pytest.importorskip("tenacity", reason=WHY)
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return LocalCompletionsAPI(
        model=running.model,
        base_url=f"{running.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(tokenizer),
        batch_size=4,
        max_length=400,
        max_retries=1,
    )


@pytest.fixture
def completions(api: Running, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return client(api, tiny_folder, monkeypatch)


def instance(kind: str, arguments: tuple[Any, ...]) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def own_logprob(folder: Path, context: str, continuation: str) -> tuple[float, bool]:
    """Of the continuation, and whether each of its tokens is the likeliest."""
    return scores(load_model(folder), load_tokenizer(folder), context, continuation)


def scores(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    tokens = tokenizer(context + continuation)["input_ids"]
    first = len(tokenizer(context)["input_ids"])
    with torch.inference_mode():
        logp_LV = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    wanted = [(logp_LV[at - 1], tokens[at]) for at in range(first, len(tokens))]
    return sum(float(row[token]) for row, token in wanted), all(int(row.argmax()) == token for row, token in wanted)


BEGINNINGS = """The capital of France is
Water boils at a temperature of
My favourite book is called
She opened the door and
The largest planet of the solar system is
In the year 1969, people
To bake bread you need
The opposite of hot is
A triangle has three
He said that he would
The sun rises in the
Two plus two is
Photosynthesis is the process by which
The dog ran after the
Once upon a time, there was
The first president of the United States was""".splitlines()


def test_continuations_are_scored_as_transformers_scores_them(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them are greedy: what transformers itself writes. The others are the next beginning's."""
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32), load_tokenizer(bundled)
    pairs = []
    for number, beginning in enumerate(BEGINNINGS):
        ids = tokenizer(beginning, return_tensors="pt")
        written = theirs.generate(**ids, do_sample=False, max_new_tokens=4, min_new_tokens=4)[0]
        greedy = tokenizer.decode(written)[len(beginning) :]
        other = BEGINNINGS[number - 1].partition(" ")[2]
        pairs += [(beginning, greedy), (beginning, f" {other}")]
    expected = [scores(theirs, tokenizer, *pair) for pair in pairs]
    assert sum(greedy for _, greedy in expected) >= 12
    with serving(bundled, tmp_path) as running:
        found = client(running, bundled, monkeypatch).loglikelihood(
            [instance("loglikelihood", pair) for pair in pairs], disable_tqdm=True
        )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for pair, (logprob, _), (own, _) in zip(pairs, found, expected, strict=True):
        assert logprob == pytest.approx(own, abs=2e-3), pair


def test_generation_is_greedy_and_ends_before_its_stop_string(completions: Any, api: Running) -> None:
    [whole] = completions.generate_until([instance("generate_until", ("one", {"until": [], "max_gen_toks": 24}))])
    with api.api() as client:
        body = {"model": api.model, "prompt": "one", "max_tokens": 24, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == whole
    stop = whole[5:7]
    [cut] = completions.generate_until([instance("generate_until", ("one", {"until": [stop], "max_gen_toks": 24}))])
    assert cut == whole[: whole.index(stop)]


def test_chats_are_generated_too(completions: Any, api: Running) -> None:
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    chat = LocalChatCompletion(model=api.model, base_url=f"{api.url}/v1/chat/completions", max_retries=1)
    messages = [{"role": "user", "content": "one and two"}]
    asked = JsonChatStr(json.dumps(messages))
    [text] = chat.generate_until([instance("generate_until", (asked, {"until": ["\n\n"], "max_gen_toks": 12}))])
    with api.api() as client:
        body = {"model": api.model, "messages": messages, "max_tokens": 12, "temperature": 0, "stop": ["\n\n"]}
        expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert text == expected


def test_a_task_is_evaluated_over_the_endpoint(completions: Any, tiny_folder: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    better = [own_logprob(tiny_folder, text, " b")[0] > own_logprob(tiny_folder, text, " a")[0] for text in QUESTIONS]
    labels = [int(one) for one in better[:3]] + [int(not one) for one in better[3:]]  # three of five are right
    rows = [{"question": text, "label": label} for text, label in zip(QUESTIONS, labels, strict=True)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "letters.yaml").write_text(TASK.format(data=tmp_path / "test.jsonl"))
    found = simple_evaluate(
        model=completions,
        tasks=["shoal_letters"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["results"]["shoal_letters"]["acc,none"] == pytest.approx(0.6)
