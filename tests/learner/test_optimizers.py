"""Muon: its formula against PyTorch's, what it trains, and that a resumed run equals the uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.learner import optimizers
from shoal.learner.checkpoint import Checkpoints, Progress
from shoal.learner.optimizers import Muon, newton_schulz
from shoal.learner.policy import Policy

from .support import N_TOKENS, batches, equal, make_policy, masters, state

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)], ids=str)
def test_muon_is_that_of_pytorch_bit_for_bit(shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    muon = Muon([ours], lr=0.01, momentum=0.9, weight_decay=0.1, compute=torch.bfloat16, device=torch.device("cpu"))
    reference = torch.optim.Muon([theirs], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=draw)
        theirs.grad = ours.grad.clone()
        muon.step()
        reference.step()
        assert torch.equal(ours, theirs)


def test_newton_schulz_keeps_singular_vectors_and_evens_out_singular_values() -> None:
    draw = torch.Generator().manual_seed(1)
    matrix = torch.randn(12, 20, generator=draw) * 100
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.diag(left.T @ newton_schulz(matrix) @ right.T)
    assert bool(((values > 0.6) & (values < 1.3)).all())


def test_muon_trains_the_matrices_of_the_blocks_and_adamw_the_rest(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder, optimizer="muon")
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in policy.matrices} == set(parts)
    assert len(policy.matrices) == 2 * len(parts)
    before = masters(policy)
    policy.update(batches(), N_TOKENS)
    assert all(not torch.equal(before[name], now) for name, now in masters(policy).items())
    for name, master in policy.masters.items():
        kept = set(policy.optimizer.state[master])
        assert kept == ({"momentum_buffer"} if name in policy.matrices else {"step", "exp_avg", "exp_avg_sq"})
    assert not any(name in policy.matrices for name in ("model.embed_tokens.weight", "model.norm.weight"))


def test_muon_makes_good_completions_likelier(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder, optimizer="muon")
    losses = [policy.update(batches(), N_TOKENS)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]


def resumable(folder: Path, **changed: Any) -> Policy:
    schedule = {"schedule": "cosine", "schedule_steps": 5, "warmup_steps": 1, "weight_decay": 0.1}
    return make_policy(folder, optimizer="muon", **(schedule | changed))


def test_a_resumed_run_with_muon_and_a_schedule_equals_the_uninterrupted_one(tiny_folder: Path, tmp_path: Path) -> None:
    straight, interrupted, resumed = (resumable(tiny_folder) for _ in range(3))
    figures = [straight.update(batches(), N_TOKENS) for _ in range(4)]
    for _ in range(2):
        interrupted.update(batches(), N_TOKENS)
    checkpoints = Checkpoints(tmp_path, interrupted)
    checkpoints.begin(Progress(step=2))
    checkpoints.finish()
    assert Checkpoints(tmp_path, resumed).restore().updates == 2
    assert equal(state(resumed), state(interrupted))
    assert [resumed.update(batches(), N_TOKENS) for _ in range(2)] == figures[2:]
    assert equal(state(resumed), state(straight))


def test_without_momentum_muon_is_another_update(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_momentum = resumable(tiny_folder)
    monkeypatch.setattr(optimizers, "MOMENTUM", 0.0)
    without = resumable(tiny_folder)
    for policy in (with_momentum, without):
        for micro in (batches(), batches(20)[:1]):
            policy.update(micro, N_TOKENS)
    name = next(iter(with_momentum.matrices))
    assert not torch.equal(with_momentum.masters[name], without.masters[name])
