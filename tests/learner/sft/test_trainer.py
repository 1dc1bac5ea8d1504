"""Fine-tuning on conversations packs them without changing the loss, resumes bit for bit, and writes the model."""

import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import Config, ConfigError, parse
from shoal.config.recipe import SftSection
from shoal.errors import UserError
from shoal.learner.sft.conversations import ChatTemplate, Dialogue
from shoal.learner.sft.trainer import Data, Sft, load_data, micro_batches, open_policy, plan
from shoal.model.load import eos_ids, load_model, load_tokenizer

from ..support import StopsAfter

pytestmark = pytest.mark.usefixtures("one_thread")
NEVER = threading.Event()


@pytest.fixture
def rows(tmp_path) -> Path:
    """Twenty conversations of one or two turns and different lengths. An answer repeats the question's last letter."""
    path = tmp_path / "chat.jsonl"
    lines = []
    for i in range(20):
        words = "abcdefghij"[i % 10] * (1 + i % 4)
        turn = [{"role": "user", "content": f"say {words}"}, {"role": "assistant", "content": words[-1] * 3}]
        lines.append(json.dumps({"messages": turn * (1 + i % 2)}) + "\n")
    path.write_text("".join(lines))
    return path


def config(rows: Path, **changed: Any) -> Config:
    values = {"data": str(rows), "batch": 4, "lr": 1e-3, "warmup_steps": 2, "max_tokens": 64, "checkpoint_every": 2}
    return parse({"sft": values | {"eval_frac": 0.2} | changed})


def data_of(folder: Path, settings: Config) -> Data:
    return load_data(load_tokenizer(folder), folder, settings)


def make(model: Path, out: Path, settings: Config) -> Sft:
    return Sft(open_policy(model, settings, "float32"), data_of(model, settings), settings, out)


def metrics(out: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def test_packing_does_not_change_the_loss(tiny_folder, rows, tmp_path):
    settings = config(rows)
    sft = make(tiny_folder, tmp_path / "out", settings)
    examples = sft.data.train
    loss = sft._mean_loss(examples)
    with torch.no_grad():
        packed = [float(loss(micro)) for micro in micro_batches(examples, row_tokens=256)]
        alone = [float(loss(micro)) for e in examples for micro in micro_batches([e], row_tokens=64)]
        nats = 0.0  # the total loss as transformers computes it, one conversation at a time
        for example in examples:
            logits_TV = sft.policy.model(torch.tensor([list(example.tokens)])).logits[0]
            for start, stop in example.spans:
                targets = torch.tensor(example.tokens[start:stop])
                nats += float(
                    torch.nn.functional.cross_entropy(logits_TV[start - 1 : stop - 1], targets, reduction="sum")
                )
    assert len(packed) < len(alone) == len(examples)
    assert sum(packed) == pytest.approx(sum(alone), rel=1e-5)
    assert sum(packed) == pytest.approx(nats / sum(example.n_trained for example in examples), rel=1e-5)


def test_the_loss_falls_and_the_model_is_written(tiny_folder, rows, tmp_path):
    out = tmp_path / "out"
    settings = config(rows, epochs=6, checkpoint_every=0)
    model = make(tiny_folder, out, settings).run(NEVER)
    heldout = metrics(out, "heldout_loss")
    assert list(heldout) == [0, 24] and heldout[24] < heldout[0] - 1
    assert list(metrics(out, "loss")) == list(range(1, 25))
    names = ["metrics.jsonl", "model", "run.json", "training.lock"]  # no checkpoints
    assert sorted(path.name for path in out.iterdir()) == names

    assert model is not None
    published = Sft(open_policy(model, settings, "float32"), data_of(model, settings), settings, tmp_path / "again")
    (tmp_path / "again").mkdir()
    published.evaluate()
    assert metrics(tmp_path / "again", "heldout_loss") == {0: heldout[24]}


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tiny_folder, rows, tmp_path):
    settings = config(rows, epochs=2)
    straight = make(tiny_folder, tmp_path / "straight", settings).run(NEVER)
    assert make(tiny_folder, tmp_path / "cut", settings).run(StopsAfter(3)) is None
    shutil.rmtree(tmp_path / "cut/checkpoints/step-000003")  # as if the run was killed before this checkpoint
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    resumed = make(tiny_folder, tmp_path / "cut", settings).run(NEVER)
    assert straight is not None and resumed is not None
    weights = [load_model(folder).state_dict() for folder in (straight, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for name in ("loss", "heldout_loss", "lr", "grad_norm"):
        assert metrics(tmp_path / "straight", name) == metrics(tmp_path / "cut", name)
    lines = [(tmp_path / run / "metrics.jsonl").read_text().count("\n") for run in ("straight", "cut")]
    assert lines[0] == lines[1]  # each update is recorded once


@pytest.mark.parametrize("changed", [{"batch": 5}, {"eval_frac": 0.1}])
def test_a_folder_of_another_run_is_refused(tiny_folder, rows, tmp_path, changed):
    make(tiny_folder, tmp_path / "out", config(rows)).run(StopsAfter(0))
    with pytest.raises(ConfigError, match="holds a run with another model, seed, batch or data"):
        make(tiny_folder, tmp_path / "out", config(rows, **changed)).run(NEVER)


def test_each_epoch_trains_on_every_conversation_once_in_a_new_order():
    updates = plan(10, SftSection(epochs=3, batch=4), seed=1)
    assert [len(batch) for _, batch in updates] == [4, 4, 2] * 3
    orders = [[i for epoch, batch in updates if epoch == e for i in batch] for e in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert updates == plan(10, SftSection(epochs=3, batch=4), seed=1)
    assert updates == plan(10, SftSection(epochs=5, batch=4), seed=1)[: len(updates)]
    assert updates != plan(10, SftSection(epochs=3, batch=4), seed=2)


def test_held_out_conversations_are_not_trained_on(tiny_folder, rows):
    data, whole = data_of(tiny_folder, config(rows)), data_of(tiny_folder, config(rows, eval_frac=0)).train
    assert (len(data.train), len(data.heldout)) == (16, 4)
    parts = [e.tokens.tobytes() for e in [*data.train, *data.heldout]]
    assert sorted(parts) == sorted(e.tokens.tobytes() for e in whole)


def test_long_conversations_are_dropped_with_one_warning(tiny_folder, rows, caplog):
    with caplog.at_level(logging.WARNING):
        data = data_of(tiny_folder, config(rows, max_tokens=24, eval_frac=0))
    assert data.train and max(len(example.tokens) for example in data.train) <= 24 and not data.heldout
    [line] = caplog.messages
    assert (
        line == f"dropped {20 - len(data.train)} of 20 conversations, because they are longer than sft.max_tokens = 24"
    )


def test_a_conversation_that_is_far_too_long_is_encoded_only_once(tiny_folder, tmp_path, monkeypatch):
    """Encoding each turn's prefix takes quadratic time: two minutes for a row of 60 kB with 1,600 turns."""
    short = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    lines = [json.dumps({"messages": short * n}) for n in (1, 1, 200)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    encoded: list[Dialogue] = []
    encode = ChatTemplate._encode

    def counted(self: ChatTemplate, dialogue: Dialogue, *arguments: Any, **options: bool) -> Any:
        encoded.append(dialogue)
        return encode(self, dialogue, *arguments, **options)

    monkeypatch.setattr(ChatTemplate, "_encode", counted)
    data = data_of(tiny_folder, config(tmp_path / "long.jsonl", max_tokens=24, eval_frac=0))
    assert len(data.train) == 2
    assert sum(len(conversation.messages) == 400 for conversation in encoded) == 1


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"data": ""}, ConfigError, "sft.data is empty"),
        ({"max_tokens": 2}, UserError, "of 20 conversations, 0 fit sft.max_tokens = 2"),
    ],
)
def test_data_that_leaves_nothing_to_train_on_is_refused(tiny_folder, rows, changed, error, words):
    with pytest.raises(error, match=words):
        data_of(tiny_folder, config(rows, **changed))


def test_tokens_that_end_turns_become_the_models_eos_tokens(tiny_folder, rows, tmp_path):
    settings = config(rows, batch=16, eval_frac=0, checkpoint_every=0)
    sft = make(tiny_folder, tmp_path / "out", settings)
    model = Sft(sft.policy, Data(sft.data.train, [], {1, 2}), settings, tmp_path / "out").run(NEVER)
    assert model is not None and eos_ids(model) == (1, 2)
