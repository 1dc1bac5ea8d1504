"""A run resumed from a checkpoint equals the uninterrupted run, bit for bit on the CPU."""

import errno
import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from torch.distributed.checkpoint import hf_storage

from shoal.config.recipe import LearnerSection
from shoal.errors import ShoalError
from shoal.learner.batch import micro_batches
from shoal.learner.checkpoint import Checkpoints, LearnerProgress
from shoal.learner.groups import Group
from shoal.learner.policy import Policy

from .support import equal, make_policy, masters, state

pytestmark = pytest.mark.usefixtures("one_thread")


def fresh(folder: Path, **changed: Any) -> Policy:
    return make_policy(folder, warmup_steps=3, loss={"beta": 0.01, "entropy": 1e-4}, **changed)


def train(policy: Policy, *steps: int) -> list[dict[str, float]]:
    """Make one update per step, each on its own data."""
    figures = []
    for step in steps:
        if step == EMPTY:
            figures.append(policy.update([], 1.0))
            continue
        draw = torch.Generator().manual_seed(step)
        completions = [torch.randint(4, 60, (4,), generator=draw).tolist() for _ in range(4)]
        group = Group("s", step, [2, 3], completions, [[-4.0] * 4] * 4, [0.0, 1.0, 0.5, 1.0])
        figures.append(policy.update(micro_batches([group], row_tokens=32, normalize_std=False), group.n_tokens))
    return figures


def save(policy: Policy, step: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder, policy)
    checkpoints.begin(LearnerProgress(step=step))
    checkpoints.finish()


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tiny_folder, tmp_path, dtype):
    straight = fresh(tiny_folder, dtype=dtype)
    figures = train(straight, 0, 1, 2, 3)

    interrupted = fresh(tiny_folder, dtype=dtype)
    train(interrupted, 0, 1)
    save(interrupted, 2, tmp_path)
    resumed = fresh(tiny_folder, dtype=dtype)
    assert Checkpoints(tmp_path, resumed).restore() == LearnerProgress(step=2, updates=2)
    assert equal(state(resumed), state(interrupted))
    assert train(resumed, 2, 3) == figures[2:]  # losses, norms and learning rates
    assert equal(state(resumed), state(straight))
    assert resumed.updates == straight.updates == 4


EMPTY = -1  # makes `train` do an update without any gradient


@pytest.mark.parametrize("plan", [[0, EMPTY, 1, 2], [EMPTY, 0, EMPTY, 1]], ids=["later updates", "the first update"])
def test_writing_checkpoints_does_not_change_training_even_with_empty_updates(tiny_folder, tmp_path, plan):
    """The policy counts all updates. AdamW counts only those with a gradient, and corrects its bias by that count."""
    without, with_checkpoints, resumed = fresh(tiny_folder), fresh(tiny_folder), fresh(tiny_folder)
    for number, step in enumerate(plan):
        train(without, step)
        train(with_checkpoints, step)
        save(with_checkpoints, number + 1, tmp_path)
        assert equal(masters(with_checkpoints), masters(without))
    assert equal(state(with_checkpoints), state(without))
    Checkpoints(tmp_path, resumed).restore()
    assert train(resumed, 7) == train(without, 7)
    assert equal(state(resumed), state(without))


def test_a_checkpoint_has_the_progress_at_the_call_of_begin(tiny_folder, tmp_path):
    policy = fresh(tiny_folder)
    fields = {"skipped_in_row": 2, "version_digest": "ab", "place": {"share": 3}}
    checkpoints, progress = Checkpoints(tmp_path, policy), LearnerProgress(step=1, trained=["a"], **fields)  # type: ignore[arg-type]
    checkpoints.begin(progress)
    progress.step, progress.trained = 2, [*progress.trained, "b"]
    checkpoints.finish()
    assert steps(tmp_path) == ["step-000001"]
    resumed = fresh(tiny_folder)
    assert Checkpoints(tmp_path, resumed).restore() == LearnerProgress(step=1, trained=["a"], **fields)  # type: ignore[arg-type]
    assert train(resumed, 0) == train(policy, 0)  # before the first update there is no optimizer state
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight


@pytest.mark.parametrize("exists", [True, False])
def test_only_the_leader_decides_whether_a_checkpoint_exists(tiny_folder, tmp_path, monkeypatch, exists):
    """The other rank may look before or after the leader has renamed the folder."""
    checkpoints, sent = Checkpoints(tmp_path, fresh(tiny_folder)), []
    if exists:
        (tmp_path / "step-000001").mkdir()
    monkeypatch.setattr(checkpoints.ranks, "broadcast", lambda message: sent.append(message) or message)
    checkpoints.begin(LearnerProgress(step=1))
    assert [bool(message) for message in sent] == [exists] == [checkpoints._writing is None]
    checkpoints.finish()

    other = Checkpoints(tmp_path / "other", fresh(tiny_folder))
    if not exists:
        (tmp_path / "other" / "step-000001").mkdir(parents=True)
        (tmp_path / "other" / ".step-000001").mkdir()  # as the leader makes it
    monkeypatch.setattr(other.ranks, "rank", 1)
    monkeypatch.setattr(other.ranks, "broadcast", lambda message: sent[0])
    other.begin(LearnerProgress(step=1))
    assert (other._writing is None) == exists
    other.finish()


def test_restoring_undoes_later_training_and_resets_the_random_state(tiny_folder, tmp_path):
    policy = fresh(tiny_folder)
    train(policy, 0, 1)
    torch.manual_seed(1)
    save(policy, 2, tmp_path)
    then, wanted = state(policy), torch.rand(3)
    train(policy, 2, 3)
    assert Checkpoints(tmp_path, policy).restore().step == 2
    assert equal(state(policy), then) and policy.updates == 2
    assert torch.equal(torch.rand(3), wanted)


def test_a_checkpoint_contains_only_safetensors_and_json(tiny_folder, tmp_path):
    policy = fresh(tiny_folder)
    train(policy, 0)
    save(policy, 1, tmp_path)
    files = list((tmp_path / "step-000001").iterdir())
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    names: set[str] = set()
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
        else:
            json.loads(path.read_text())
    kinds = ("model", "exp_avg", "exp_avg_sq")
    assert names == {"rng_state", "steps"} | {f"{kind}.{name}" for kind in kinds for name in policy.masters}


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_without_a_checkpoint_training_starts_at_step_0(tiny_folder, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    policy = fresh(tiny_folder)
    before = state(policy)
    assert Checkpoints(tmp_path / folder, policy).restore() == LearnerProgress()
    assert equal(state(policy), before)


def test_an_incomplete_checkpoint_is_skipped_with_a_warning_and_written_again(tiny_folder, tmp_path, caplog):
    policy = fresh(tiny_folder)
    train(policy, 0)
    save(policy, 1, tmp_path)
    # These files look as if the learner was killed while it wrote the next checkpoint.
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".step-000002")
    next((tmp_path / ".step-000002").glob("*.safetensors")).write_bytes(b"half")
    with caplog.at_level(logging.WARNING, logger="shoal"):
        assert Checkpoints(tmp_path, fresh(tiny_folder)).restore().step == 1
    [line] = [text for text in caplog.messages if "ignoring" in text]
    assert str(tmp_path / ".step-000002") in line

    train(policy, 1)
    save(policy, 2, tmp_path)
    resumed = fresh(tiny_folder)
    assert Checkpoints(tmp_path, resumed).restore().step == 2
    assert equal(state(resumed), state(policy))


def test_a_checkpoint_with_a_flipped_bit_is_refused(tiny_folder, tmp_path):
    policy = fresh(tiny_folder)
    for step in (1, 2):
        train(policy, step)
        save(policy, step, tmp_path)
    newest = tmp_path / "step-000002"
    for path in newest.iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(ShoalError, match=rf"damaged: remove {newest} to go on from an older checkpoint"):
            Checkpoints(tmp_path, fresh(tiny_folder)).restore()
        path.write_bytes(whole)
    path.unlink()
    with pytest.raises(ShoalError, match="is damaged"):
        Checkpoints(tmp_path, fresh(tiny_folder)).restore()
    shutil.rmtree(newest)
    assert Checkpoints(tmp_path, fresh(tiny_folder)).restore().step == 1


def test_a_checkpoint_without_the_whole_state_is_refused(tiny_folder, tmp_path):
    save(fresh(tiny_folder), 1, tmp_path)
    progress, files = tmp_path / "step-000001" / "progress.json", tmp_path / "step-000001" / "files.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"updates": 1}))
    digest = {progress.name: blake3(progress.read_bytes()).hexdigest()}
    files.write_text(json.dumps(json.loads(files.read_text()) | digest))
    with pytest.raises(ShoalError, match="step-000001 does not hold this policy's state"):
        Checkpoints(tmp_path, fresh(tiny_folder)).restore()


def test_only_the_newest_checkpoints_are_kept(tiny_folder, tmp_path):
    policy = fresh(tiny_folder, keep_last=2)
    for step in (0, 4, 8, 12, 16):
        save(policy, step, tmp_path)
    assert steps(tmp_path) == ["step-000012", "step-000016"]


def test_a_complete_checkpoint_is_never_overwritten(tiny_folder, tmp_path):
    policy = fresh(tiny_folder)
    save(policy, 1, tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()}
    train(policy, 0)
    save(policy, 1, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()} == before


# --- in the background ------------------------------------------------------------------------------------------------


def test_the_optimizer_waits_for_the_checkpoint_being_written(tiny_folder, tmp_path, monkeypatch):
    policy = fresh(tiny_folder)
    train(policy, 0)
    then = state(policy)
    may_write, is_moving = threading.Event(), threading.Event()
    write = hf_storage.HuggingFaceStorageWriter.write_data

    def slow(*args: Any) -> Any:
        assert may_write.wait(20)
        return write(*args)

    monkeypatch.setattr(hf_storage.HuggingFaceStorageWriter, "write_data", slow)
    checkpoints = Checkpoints(tmp_path, policy)
    checkpoints.begin(LearnerProgress(step=1))  # this returns before anything is written
    assert steps(tmp_path) == [".step-000001"]
    wait = policy.before_update
    monkeypatch.setattr(policy, "before_update", lambda: (is_moving.set(), wait()))
    update = threading.Thread(target=train, args=(policy, 1))
    update.start()
    assert is_moving.wait(20)  # the update has computed its gradients
    update.join(0.3)
    assert update.is_alive() and equal(state(policy), then)
    may_write.set()
    update.join(20)
    assert steps(tmp_path) == ["step-000001"] and policy.updates == 2
    resumed = fresh(tiny_folder)
    Checkpoints(tmp_path, resumed).restore()
    assert equal(state(resumed), then)


def test_the_error_for_a_full_disk_names_the_folder_and_older_checkpoints_remain(tiny_folder, tmp_path, monkeypatch):
    policy = fresh(tiny_folder)
    save(policy, 1, tmp_path)
    train(policy, 0)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_storage.HuggingFaceStorageWriter, "write_data", full)
    checkpoints = Checkpoints(tmp_path, policy)
    checkpoints.begin(LearnerProgress(step=2))
    with pytest.raises(OSError, match=rf"{tmp_path}/\.step-000002.*No space left on device"):
        checkpoints.finish()
    assert Checkpoints(tmp_path, fresh(tiny_folder)).restore().step == 1


@pytest.mark.parametrize(
    ("billions", "steps", "every"),
    [(0.135, None, 1), (0.83, None, 1), (7.6, None, 10), (32.8, None, 40), (32.8, 1, 1), (0.135, 8, 8)],
)
def test_checkpoints_write_at_most_ten_gigabytes_per_step(billions, steps, every):
    section = LearnerSection() if steps is None else LearnerSection(checkpoint_every=steps)
    assert section.steps_between_checkpoints(round(billions * 1e9)) == every
