"""A learner that was killed goes on as if it had not been: bit for bit on the CPU (promise 2)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.learner import checkpoint
from shoal.learner.batch import Group, micro_batches
from shoal.learner.policy import Policy

from .support import make_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def fresh(folder: Path) -> Policy:
    return make_policy(folder, warmup_steps=3, weight_decay=0.01, loss={"beta": 0.01, "entropy": 1e-4})


def train(policy: Policy, *steps: int) -> list[dict[str, float]]:
    """One update a step, each on data of its own."""
    told = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        completions = [torch.randint(4, 60, (4,), generator=draw).tolist() for _ in range(4)]
        group = Group("s", step, [2, 3], completions, [[-4.0] * 4] * 4, [0.0, 1.0, 0.5, 1.0])
        batch = micro_batches([group], row_tokens=32, rows_per_microbatch=1, normalize_std=False)
        told.append(policy.update(batch, group.n_tokens))
    return told


def state(policy: Policy) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in policy.model.named_parameters():
        found[name] = parameter.detach().clone()
        found |= {
            f"{name}/{key}": torch.as_tensor(value).clone() for key, value in policy.optimizer.state[parameter].items()
        }
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    straight = fresh(tiny_folder)
    told = train(straight, 0, 1, 2, 3)

    interrupted = fresh(tiny_folder)
    train(interrupted, 0, 1)
    checkpoint.save(interrupted, 2, tmp_path)
    resumed = fresh(tiny_folder)
    assert checkpoint.restore(resumed, tmp_path) == 2
    assert equal(state(resumed), state(interrupted))
    assert train(resumed, 2, 3) == told[2:]  # losses, norms and learning rates too
    assert equal(state(resumed), state(straight))
    assert resumed.updates == straight.updates == 4


def test_restoring_into_a_policy_that_went_on_sets_all_of_it_back(tiny_folder: Path, tmp_path: Path) -> None:
    policy = fresh(tiny_folder)
    train(policy, 0, 1)
    checkpoint.save(policy, 2, tmp_path)
    then = state(policy)
    train(policy, 2, 3)
    assert checkpoint.restore(policy, tmp_path) == 2
    assert equal(state(policy), then) and policy.updates == 2


def test_a_checkpoint_before_the_first_update_can_be_resumed(tiny_folder: Path, tmp_path: Path) -> None:
    straight, start = fresh(tiny_folder), fresh(tiny_folder)
    checkpoint.save(start, 0, tmp_path)
    resumed = fresh(tiny_folder)
    assert checkpoint.restore(resumed, tmp_path) == 0
    assert train(resumed, 0) == train(straight, 0)


def test_the_output_head_stays_tied_to_the_embedding(tiny_folder: Path, tmp_path: Path) -> None:
    policy, resumed = fresh(tiny_folder), fresh(tiny_folder)
    train(policy, 0)
    checkpoint.save(policy, 1, tmp_path)
    checkpoint.restore(resumed, tmp_path)
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_without_a_checkpoint_it_begins_at_step_0(tiny_folder: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    policy = fresh(tiny_folder)
    before = state(policy)
    assert checkpoint.restore(policy, tmp_path / folder) == 0
    assert equal(state(policy), before)


def test_a_half_written_checkpoint_is_passed_over_and_written_again(tiny_folder: Path, tmp_path: Path) -> None:
    policy = fresh(tiny_folder)
    train(policy, 0)
    checkpoint.save(policy, 1, tmp_path)
    # killed while it wrote the next one, under its temporary name, or by an older release under the final one
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".step-000002")
    next((tmp_path / ".step-000002").glob("*.safetensors")).write_bytes(b"half")
    (tmp_path / "step-000009").mkdir()
    assert checkpoint.restore(fresh(tiny_folder), tmp_path) == 1

    train(policy, 1)
    checkpoint.save(policy, 2, tmp_path)
    resumed = fresh(tiny_folder)
    shutil.rmtree(tmp_path / "step-000009")
    assert checkpoint.restore(resumed, tmp_path) == 2
    assert equal(state(resumed), state(policy))


def test_a_kill_before_the_rename_leaves_the_last_checkpoint(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = fresh(tiny_folder)
    checkpoint.save(policy, 0, tmp_path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        checkpoint.save(policy, 1, tmp_path)
    assert checkpoint.restore(fresh(tiny_folder), tmp_path) == 0
    checkpoint.save(policy, 1, tmp_path)
    assert steps(tmp_path) == ["step-000000", "step-000001"]


def test_the_newest_two_are_kept(tiny_folder: Path, tmp_path: Path) -> None:
    policy = fresh(tiny_folder)
    for step in (0, 4, 8, 12):
        checkpoint.save(policy, step, tmp_path)
    assert steps(tmp_path) == ["step-000008", "step-000012"]
    checkpoint.save(policy, 16, tmp_path, keep=1)
    assert steps(tmp_path) == ["step-000016"]


def test_a_checkpoint_once_written_is_never_another(tiny_folder: Path, tmp_path: Path) -> None:
    policy = fresh(tiny_folder)
    checkpoint.save(policy, 1, tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()}
    train(policy, 0)
    checkpoint.save(policy, 1, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()} == before
