"""Two ranks fine-tune as one rank does, except for rounding (see `tests.learner.pretrain.test_ranks`).

Weights are published in bf16. If a master weight is almost halfway between two bf16 numbers, the two runs may round it
differently.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.cli.arguments import USAGE
from shoal.cli.main import DONE, FAILED, main
from shoal.learner.sft.trainer import Data
from tests.gloo import on_two_ranks

from .test_trainer import config, data_of, metrics, rows

__all__ = ["rows"]
pytestmark = pytest.mark.usefixtures("one_thread")
LR, UPDATES = 1e-3, 6


def command(folder: Path, rows: Path, out: Path) -> list[str]:
    path = out.with_suffix(".toml")
    path.write_text(
        f"[model]\nname = {json.dumps(str(folder))}\ndtype = 'float32'\n[sft]\ndata = {json.dumps(str(rows))}\n"
        f"batch = 3\nlr = {LR}\nwarmup_steps = 2\nmax_tokens = 24\neval_frac = 0.2\ncheckpoint_every = 2\n"
    )
    return ["sft", str(path), "--out", str(out)]


def check_close(one: Path, other: Path, moved: float = 2 * LR * UPDATES) -> None:
    """Check that few published weights differ, and by no more than the updates can move them."""
    weights = [load_file(out / "model" / "model.safetensors") for out in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    a, b = (torch.cat([held[name].flatten().float() for name in weights[0]]) for held in weights)
    assert bool(((a - b).abs() <= moved + 2**-8 * b.abs()).all())
    assert float((a != b).float().mean()) < 1e-3


def test_other_ranks_decode_exactly_the_encoded_data(tiny_folder, rows):
    data = data_of(tiny_folder, config(rows))
    assert Data.from_bytes(data.to_bytes()) == data


def test_two_ranks_train_as_one_does_and_one_rank_resumes_their_run(tiny_folder, rows, tmp_path):
    one, two = (command(tiny_folder, rows, tmp_path / name) for name in ("one", "two"))
    assert main(one) == DONE
    assert on_two_ranks(two) == [DONE, DONE]
    check_close(tmp_path / "one", tmp_path / "two")
    for name in ("loss", "heldout_loss", "tokens"):
        assert metrics(tmp_path / "one", name) == pytest.approx(metrics(tmp_path / "two", name), abs=1e-3)
    shutil.rmtree(tmp_path / "two" / "model")
    shutil.rmtree(max((tmp_path / "two" / "checkpoints").glob("step-*")))
    assert main(two) == DONE  # it continues from the checkpoint that two ranks wrote
    check_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_an_error_of_the_leader_ends_all_ranks(tiny_folder, rows, tmp_path, capfd):
    words = command(tiny_folder, rows, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"fingerprint": "another"}')
    assert on_two_ranks(words) == [USAGE, FAILED]
    assert capfd.readouterr().err.count("rank 0 ended: ") == 1
    assert on_two_ranks([*words, "--set", "sft.data="]) == [USAGE, FAILED]
    assert capfd.readouterr().err.count("sft.data is empty") == 2
