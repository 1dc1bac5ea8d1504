"""Pretraining at one site resumes bit for bit, follows its learning rate, and reports each error in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.cli.main import DONE, FAILED, USAGE, main
from shoal.config.sites import PretrainSection
from shoal.learner.pretrain.trainer import Pretraining, rate
from shoal.model.load import load_model

from ..support import StopsAfter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stop_after(monkeypatch) -> Any:
    def install(steps: int) -> None:
        monkeypatch.setattr("shoal.cli.launch.process.begin", lambda name, *, threads: StopsAfter(steps))

    install(10**9)
    return install


@pytest.fixture
def config(tiny_folder, tmp_path) -> str:
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": f"{i} + {i} = {2 * i}. " * 5}) + "\n" for i in range(60)))
    path = tmp_path / "small.toml"
    path.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n[pretrain]\ndata = {json.dumps(str(data))}\n"
        "steps = 8\nbatch = 4\nmicro_batch = 3\ntokens = 32\nlr = 3e-3\nwarmup_steps = 2\nheldout = 4\n"
        "checkpoint_every = 3\n"
    )
    return str(path)


def train(config: str, out: Path, *overrides: str) -> int:
    return main(["pretrain", config, "--out", str(out), *(word for each in overrides for word in ("--set", each))])


def newest(out: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in max((out / "checkpoints").glob("step-*")).glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def test_a_resumed_training_equals_the_uninterrupted_one_bit_for_bit(config, tmp_path, stop_after, monkeypatch, capsys):
    """After a kill, training resumes from the newest complete checkpoint. After a stop, it resumes where it stopped."""
    assert train(config, tmp_path / "whole") == DONE
    assert capsys.readouterr().out == f"{tmp_path / 'whole' / 'model'}\n"
    load_model(tmp_path / "whole" / "model")
    for steps, killed in ((5, True), (1, False), (10**9, False)):
        stop_after(steps)
        with monkeypatch.context() as patch:
            if killed:
                patch.setattr(Pretraining, "pause", lambda self: None)
            assert train(config, tmp_path / "parts") == (FAILED if steps < 10 else DONE)
        if killed:
            (tmp_path / "parts" / "checkpoints" / ".step-000006").mkdir()
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    lines = [(tmp_path / part / "metrics.jsonl").read_text().splitlines() for part in ("whole", "parts")]
    losses = [[each["loss"] for line in part if "loss" in (each := json.loads(line))] for part in lines]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert losses[0][-1] < losses[0][0]


def test_micro_batches_change_a_step_only_by_rounding(config, tmp_path, stop_after):
    for name, size in (("one", 4), ("four", 1)):
        assert train(config, tmp_path / name, f"pretrain.micro_batch={size}", "pretrain.steps=2") == DONE
    one, four = newest(tmp_path / "one"), newest(tmp_path / "four")
    assert all(torch.allclose(one[name], four[name], atol=1e-3) for name in one if name.startswith("exp_avg."))


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    settings = PretrainSection(lr=1.0, warmup_steps=10, steps=110)
    assert [rate(step, settings) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert rate(60, settings) == pytest.approx(0.55)
    assert rate(110, settings) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("override", "status", "words"),
    [
        ("pretrain.data=nowhere.jsonl", USAGE, "no file matches 'nowhere.jsonl'"),
        ("pretrain.stepz=3", USAGE, "did you mean 'pretrain.steps'?"),
        ("pretrain.lr=inf", USAGE, "pretrain.lr"),
        ("pretrain.lr=1e30", FAILED, "lower the learning rate"),
        ("model.device=cuda:99", USAGE, 'choose another, such as "cpu"'),
    ],
)
def test_an_error_is_reported_in_one_line(config, tmp_path, stop_after, override, status, words, capsys):
    assert train(config, tmp_path / "out", override) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("shoal pretrain: ") and words in last


def test_a_folder_of_another_run_is_refused(config, tmp_path, stop_after, capsys):
    stop_after(1)
    assert train(config, tmp_path / "out") == FAILED
    assert train(config, tmp_path / "out", "pretrain.lr=1e-3") == USAGE
    assert "holds a run with pretrain.lr = 0.003, not 0.001" in capsys.readouterr().err
