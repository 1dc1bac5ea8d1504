"""Training bundled:tiny lowers the loss, uses only the answers, and never sees held-out sums."""

import os
from pathlib import Path

import pytest
import torch

from shoal import tasks
from shoal.config import load
from shoal.config.tasks import SourceSection, TaskSection
from shoal.learner.policy import Policy
from shoal.learner.sft import tiny as tiny_module
from shoal.learner.sft.tiny import TINY_TASKS, _example, _tiny_model, _tiny_tokenizer, train
from shoal.model.tree import pack
from shoal.tasks.prompt import prompt_tokens

from ..support import make_policy

TINY_CONFIG = Path(__file__).parents[3] / "configs" / "tiny.toml"
SUMS = TaskSection(
    sources=[SourceSection(generator="arithmetic", options={"operand_max": 9})], heldout=20, prompt="{question}="
)
pytestmark = pytest.mark.usefixtures("one_thread")


def heldout_loss(policy: Policy) -> float:
    examples = [_example(policy.tokenizer, SUMS, task.question, task.answer) for task in tasks.load(SUMS).heldout]
    with torch.no_grad():
        logprobs_N, _ = policy.logprobs(pack(examples), with_entropy=False)
    return -float(logprobs_N.mean())


def test_training_lowers_the_loss_on_held_out_sums(tiny_folder):
    trained = make_policy(tiny_folder)
    before = heldout_loss(trained)
    train(trained, SUMS, batch=16, until_loss=0.0, max_steps=8)
    assert trained.updates == 8
    assert heldout_loss(trained) < before - 0.5


def test_training_ends_when_the_loss_is_low_enough(tiny_folder):
    trained = make_policy(tiny_folder)
    train(trained, SUMS, batch=4, until_loss=1e9, max_steps=8)
    assert trained.updates == 1


def test_bundled_tiny_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny_module, "train", lambda *_, **settings: None)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    assert {path.stat().st_ino for path in tiny_module.tiny().iterdir()} <= synced


def test_an_example_has_the_workers_prompt_and_the_answer_followed_by_eos():
    tokenizer, config = _tiny_tokenizer(), load(TINY_CONFIG).tasks
    task = tasks.load(config).train[0]
    example = _example(tokenizer, TINY_TASKS, task.question, task.answer)
    assert example.prompt == prompt_tokens(tokenizer, config, task, 0)
    assert tokenizer.decode(example.prompt) == f"<bos>{task.question}="
    assert [tokenizer.decode(completion) for completion in example.completions] == [f"{task.answer}<eos>"]


def test_the_tiny_tokenizer_round_trips_text_and_fits_its_model():
    tokenizer, config = _tiny_tokenizer(), _tiny_model().config
    for text in ("".join(map(chr, range(32, 127))) + "\n", "12 + 34 = 46", "  two  spaces ", ""):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(tokens) == len(text) and tokenizer.decode(tokens) == text
    assert tokenizer("\u00e9", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]
    assert len(tokenizer) <= config.vocab_size
    for end in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(tokenizer, end) == getattr(config, end), end


def test_bundled_tiny_is_never_trained_on_held_out_sums():
    kept = {task.id for task in tasks.load(TINY_TASKS).heldout}
    held_out = {task.id for task in tasks.load(load(TINY_CONFIG).tasks).heldout}
    assert held_out <= kept
    assert not held_out & {task.id for task in tasks.load(TINY_TASKS).train}
