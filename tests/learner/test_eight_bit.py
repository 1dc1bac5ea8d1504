"""8-bit AdamW: close to AdamW, small, resumed to the same bits, and refused with a reason where bitsandbytes is missing."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from shoal.learner.checkpoint import Checkpoints, Progress
from shoal.learner.eight_bit import AdamW8bit, EightBitError, fresh, matrices

from .sharding import digests
from .support import N_TOKENS, batches, equal, make_policy, masters, state
from .test_ranks import torchrun

pytestmark = pytest.mark.usefixtures("one_thread")
installed = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install 'shoal[8bit]'"
)
SETTINGS = {"optimizer": "adamw_8bit", "weight_decay": 0.1}


def test_without_bitsandbytes_it_is_refused_with_what_to_install(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(EightBitError, match=r"pip install \"shoal\[8bit\]\""):
        make_policy(tiny_folder, optimizer="adamw_8bit")


def test_matrices_whose_rows_are_whole_blocks_are_kept_in_8_bits() -> None:
    shapes = {"a": (3, 256), "b": (256, 3), "c": (512,), "d": (2, 512), "e": (2, 2, 256)}
    assert matrices({name: torch.empty(shape) for name, shape in shapes.items()}) == {"a", "d"}
    kept = fresh(torch.empty(100, 512))
    assert sum(of.numel() * of.element_size() for of in kept.values()) == 4 + 2 * 100 * (512 + 4 * 2)


@installed
def test_its_updates_are_near_those_of_adamw() -> None:
    """Of gradients of one size in a block, where 8 bits suffice."""
    draw = torch.Generator().manual_seed(0)
    small, full = (torch.nn.Parameter(torch.ones(4, 512)) for _ in range(2))
    eight = AdamW8bit([small], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    adamw = torch.optim.AdamW([full], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(5):
        small.grad = torch.randn(4, 512, generator=draw).sign() * 0.5
        full.grad = small.grad.clone()
        eight.step()
        adamw.step()
    assert float((full.detach() - 1).abs().mean()) > 0.01, "they moved"
    error = float((small - full).detach().abs().mean())
    assert error < 0.05 * float((full.detach() - 1).abs().mean())


@installed
def test_rows_alone_get_the_bits_of_the_whole_matrix() -> None:
    """So sharding changes none."""
    draw = torch.Generator().manual_seed(1)
    start, *grads = (torch.randn(6, 256, generator=draw) for _ in range(4))
    whole, top, bottom = (torch.nn.Parameter(of.clone()) for of in (start, start[:2], start[2:]))
    optimizers = [AdamW8bit([of], 0.01, (0.9, 0.99), 0.1) for of in (whole, top, bottom)]
    for grad in grads:
        whole.grad, top.grad, bottom.grad = grad.clone(), grad[:2].clone(), grad[2:].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat([top, bottom]))


@installed
def test_a_resumed_run_equals_the_uninterrupted_one(tiny_folder: Path, tmp_path: Path) -> None:
    straight, interrupted, resumed = (make_policy(tiny_folder, **SETTINGS) for _ in range(3))
    assert straight.matrices and all("down_proj" in name for name in straight.matrices)
    before = masters(straight)
    figures = [straight.update(batches(), N_TOKENS) for _ in range(4)]
    assert all(not torch.equal(before[name], now) for name, now in masters(straight).items())
    for _ in range(2):
        interrupted.update(batches(), N_TOKENS)
    checkpoints = Checkpoints(tmp_path, interrupted)
    checkpoints.begin(Progress(step=2))
    checkpoints.finish()
    assert Checkpoints(tmp_path, resumed).restore().updates == 2
    assert equal(state(resumed), state(interrupted))
    assert {of.dtype for of in state(resumed).values()} == {torch.float32, torch.uint8}
    assert [resumed.update(batches(), N_TOKENS) for _ in range(2)] == figures[2:]
    assert equal(state(resumed), state(straight))


@installed
@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one_and_one_reads_their_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    torchrun(2, tmp_path, [{"check": "eight_bit", "model": str(tiny_folder), "out": str(out), "settings": SETTINGS}])
    leader, other = (json.loads((out / f"{rank}.json").read_text()) for rank in range(2))
    assert leader["differ"] == other["differ"] == []
    resumed = make_policy(tiny_folder, **SETTINGS)
    assert Checkpoints(out, resumed).restore().updates == 2
    assert digests(resumed) == leader["digests"]
