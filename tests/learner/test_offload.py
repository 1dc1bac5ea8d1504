"""What a learner offloads is on the host, where it gets the bits that it would have on the device.

The device is pretended (`pretend`): PyTorch's CPU kernels compute what is on it. No GPU ran this.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.learner.checkpoint import Checkpoints, LearnerProgress

from . import pretend
from .sharding import places
from .support import N_TOKENS, batches, equal, make_policy, state

pytestmark = pytest.mark.usefixtures("one_thread")
BF16: dict[str, Any] = {"dtype": "bfloat16"}
SETTINGS = {
    "adamw": BF16 | {"loss": {"beta": 0.01}},
    "float32": {},
    "lora": BF16 | {"lora": {"rank": 4}},
    "checkpointing": BF16 | {"activation_checkpointing": True},
}
QUICK = ("adamw",)


def on_the_host(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_one_rank_that_offloads_has_the_bits_of_one_that_does_not(tiny_folder: Path, name: str) -> None:
    figures, states, published = [], [], []
    with pretend.device() as device:
        for offload in (False, True):
            torch.manual_seed(1)
            policy = make_policy(tiny_folder, device=device, offload=offload, **SETTINGS[name])
            figures.append([policy.update(batches(20), N_TOKENS) for _ in range(2)])
            states.append(on_the_host(state(policy)))
            published.append(dict(policy.published()))
            policy.accumulate(batches(20))
            where = places(policy) | {"gradients": sorted({of.grad.device.type for of in policy.masters.values()})}  # type: ignore[union-attr]
            host = {"masters", "state", "gradients"} if offload else set()
            assert where == {what: ["cpu" if what in host else pretend.NAME] for what in where}
            assert all(weight.grad is None for weight in policy.weights.values())
    assert figures[0] == figures[1]
    assert equal(*states) and equal(*published)


def test_a_checkpoint_of_what_is_offloaded_resumes_on_the_host_and_on_the_device(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with pretend.device() as device:
        straight, *resumed = (
            make_policy(tiny_folder, device=device, offload=offload, **BF16) for offload in (True, True, False)
        )
        straight.update(batches(), N_TOKENS)
        checkpoints = Checkpoints(tmp_path, straight)
        checkpoints.begin(LearnerProgress(step=1))
        checkpoints.finish()
        figures = straight.update(batches(), N_TOKENS)
        for policy in resumed:
            assert Checkpoints(tmp_path, policy).restore().updates == 1
            assert policy.update(batches(), N_TOKENS) == figures
            assert equal(on_the_host(state(policy)), on_the_host(state(straight)))
        assert places(resumed[0])["state"] == ["cpu"]


def test_on_a_cpu_nothing_is_offloaded(tiny_folder: Path) -> None:
    """A meeting of sites opens a GPU learner's policy on its CPU. (A config that asks for it on a CPU is refused.)"""
    policy = make_policy(tiny_folder, offload=True)
    assert not policy.offloads and set(map(tuple, places(policy).values())) <= {("cpu",), ()}


def test_the_pretended_device_refuses_to_meet_the_cpu() -> None:
    with pretend.device() as device:
        there = torch.ones(2, device=device)
        assert (there + 1).device.type == pretend.NAME and torch.equal(there.cpu(), torch.ones(2))
        with pytest.raises(RuntimeError, match="meet"):
            there + torch.ones(2)
        with pytest.raises(RuntimeError, match="meet"):
            torch.ones(2).add_(there)
