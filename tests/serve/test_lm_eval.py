"""lm-eval's API models are the clients. They request logprobs of given continuations, generate, and run a task."""

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


def score(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Return the continuation's logprob, and whether each of its tokens is the likeliest."""
    tokens = tokenizer(context + continuation)["input_ids"]
    first = len(tokenizer(context)["input_ids"])
    with torch.inference_mode():
        logp_LV = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    rows = [(logp_LV[at - 1], tokens[at]) for at in range(first, len(tokens))]
    return sum(float(row[token]) for row, token in rows), all(int(row.argmax()) == token for row, token in rows)


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


def test_continuations_get_the_same_scores_as_from_transformers(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers generates half of the continuations greedily. The other half are words of another beginning."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32), load_tokenizer(bundled)
    pairs = []
    for number, beginning in enumerate(BEGINNINGS):
        ids = tokenizer(beginning, return_tensors="pt")
        written = model.generate(**ids, do_sample=False, max_new_tokens=4, min_new_tokens=4)[0]
        greedy = tokenizer.decode(written)[len(beginning) :]
        other = BEGINNINGS[number - 1].partition(" ")[2]
        pairs += [(beginning, greedy), (beginning, f" {other}")]
    expected = [score(model, tokenizer, *pair) for pair in pairs]
    assert sum(greedy for _, greedy in expected) >= 12
    with serving(bundled, tmp_path) as running:
        scores = client(running, bundled, monkeypatch).loglikelihood(
            [instance("loglikelihood", pair) for pair in pairs], disable_tqdm=True
        )
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    for pair, (logprob, _), (own, _) in zip(pairs, scores, expected, strict=True):
        assert logprob == pytest.approx(own, abs=2e-3), pair


def test_generation_is_greedy_and_ends_before_the_stop_string(completions: Any, api: Running) -> None:
    [whole] = completions.generate_until([instance("generate_until", ("one", {"until": [], "max_gen_toks": 24}))])
    assert api.complete(prompt="one", max_tokens=24, temperature=0).json()["choices"][0]["text"] == whole
    stop = whole[5:7]
    [cut] = completions.generate_until([instance("generate_until", ("one", {"until": [stop], "max_gen_toks": 24}))])
    assert cut == whole[: whole.index(stop)]


def test_chat_completions_equal_those_of_the_api(completions: Any, api: Running) -> None:
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    chat = LocalChatCompletion(model=api.model, base_url=f"{api.url}/v1/chat/completions", max_retries=1)
    messages = [{"role": "user", "content": "one and two"}]
    arguments = (JsonChatStr(json.dumps(messages)), {"until": ["\n\n"], "max_gen_toks": 12})
    [text] = chat.generate_until([instance("generate_until", arguments)])
    response = api.chat(messages, temperature=0, stop=["\n\n"]).json()
    assert text == response["choices"][0]["message"]["content"]


def test_a_task_is_evaluated_over_the_endpoint(completions: Any, tiny_folder: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    prefers_b = [score(model, tokenizer, text, " b")[0] > score(model, tokenizer, text, " a")[0] for text in QUESTIONS]
    # The labels make the model right on the first three of five questions.
    labels = [int(b) for b in prefers_b[:3]] + [int(not b) for b in prefers_b[3:]]
    rows = [{"question": text, "label": label} for text, label in zip(QUESTIONS, labels, strict=True)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "letters.yaml").write_text(TASK.format(data=tmp_path / "test.jsonl"))
    results = simple_evaluate(
        model=completions,
        tasks=["shoal_letters"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results["results"]["shoal_letters"]["acc,none"] == pytest.approx(0.6)
