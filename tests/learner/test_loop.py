"""The learner's loop trains on accepted files. A killed learner resumes and makes the same versions."""

import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from shoal.errors import ShoalError
from shoal.learner.loop import MAX_SKIPS

from .support import STRANGER, VALIDATOR, Pool, accepted, equal, make_learner, rollouts, step_file, submission

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
STEPS = 5
CHANGED = {"checkpoint_every": 2}
FILE = rollouts(5, 4)


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    return [step_file(step) for step in range(STEPS)]


@pytest.fixture(scope="module")
def straight(tiny_folder, tmp_path_factory, files, one_thread) -> Path:
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("straight")
    assert make_learner(tiny_folder, out, Pool(*files), steps=STEPS, **CHANGED).run(threading.Event()) == "finished"
    return out


def versions(out: Path) -> dict[str, bytes]:
    return {path.name: (path / "model.safetensors").read_bytes() for path in (out / "versions").iterdir()}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        result |= load_file(path)
    return result


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(folder: Path, out: Path, files: list[bytes], die: dict[str, int]) -> None:
    """Run the learner in `out` as a process that kills itself."""
    kept = out / "files"
    kept.mkdir(parents=True)
    for step, data in enumerate(files):
        (kept / f"{step}.parquet").write_bytes(data)
    job = {"model": str(folder), "out": str(out), "files": str(kept), "validator": VALIDATOR.public, "steps": STEPS}
    (out / "jobs.json").write_text(json.dumps([job | {"dtype": "float32", "changed": CHANGED, "die": die}]))
    command = [sys.executable, "-m", "tests.learner.process", str(out / "jobs.json")]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


@pytest.mark.parametrize(
    ("die", "kept", "half"),
    [
        ({"updating": 3}, ["step-000002"], []),  # version 3 is published, but no checkpoint has its state
        ({"checkpointing": 1}, ["step-000002"], [".step-000004"]),
    ],
    ids=["in an update", "in a checkpoint"],
)
def test_a_killed_learner_resumes_and_makes_the_same_versions_bit_for_bit(
    tiny_folder, tmp_path, files, straight, die, kept, half, caplog
):
    killed(tiny_folder, tmp_path, files, die)
    assert names(tmp_path / "checkpoints") == half + kept
    published = versions(tmp_path)
    assert "v000003" in published
    pool = Pool(*files)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        assert make_learner(tiny_folder, tmp_path, pool, steps=STEPS, **CHANGED).run(threading.Event()) == "finished"
    ignored = [text for text in caplog.messages if text.startswith("ignoring")]
    assert len(ignored) == len(half) and all(name in text for name, text in zip(half, ignored, strict=True))
    assert [report.step for report in pool.reports] == [2, 3, 4]
    assert versions(tmp_path) == versions(straight)
    assert published.items() <= versions(straight).items()
    last = f"checkpoints/step-{STEPS:06d}"
    assert equal(tensors(tmp_path / last), tensors(straight / last))
    assert (tmp_path / last / "progress.json").read_text() == (straight / last / "progress.json").read_text()


def test_a_finished_run_leaves_versions_checkpoints_and_the_model(straight):
    result, last = versions(straight), straight / "versions" / f"v{STEPS:06d}"
    assert sorted(result) == [f"v{version:06d}" for version in range(STEPS + 1)]
    assert len(set(result.values())) == STEPS + 1
    assert names(straight / "model") == names(last)
    assert (straight / "model" / "model.safetensors").read_bytes() == result[last.name]
    assert names(straight / "checkpoints") == ["step-000002", "step-000004", "step-000005"]
    for step in (2, 4, 5):
        progress = json.loads((straight / f"checkpoints/step-{step:06d}/progress.json").read_text())
        fields = {"step": step, "updates": step, "skipped_in_row": 0, "place": None}
        trained = [submission(number) for number in range(step)]
        assert progress == fields | {"trained": trained, "version_digest": blake3(result[f"v{step:06d}"]).hexdigest()}


def test_old_versions_and_checkpoints_are_deleted(tiny_folder, tmp_path, files):
    make_learner(tiny_folder, tmp_path, Pool(*files), steps=3, keep_versions=2, keep_last=1).run(threading.Event())
    assert names(tmp_path / "versions") == ["v000002", "v000003"]
    assert names(tmp_path / "checkpoints") == ["step-000003"]


@pytest.mark.parametrize("half", ["v000000", "step-000002"])
def test_a_learner_killed_while_it_deletes_a_version_or_a_checkpoint_starts_again(
    tiny_folder, tmp_path, files, monkeypatch, half
):
    rmtree = shutil.rmtree

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if half in path.name and path.exists():
            next(path.glob("*.safetensors")).unlink()
            raise KeyboardInterrupt
        rmtree(path, ignore_errors=ignore_errors)

    def run() -> str:
        changed = {"checkpoint_every": 2, "keep_versions": 2, "keep_last": 1}
        return make_learner(tiny_folder, tmp_path, Pool(*files), steps=4, **changed).run(threading.Event())

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        run()
    [path] = tmp_path.glob(f"*/*{half}*")
    assert path.name == f".{half}.gone", "a half-deleted folder has a version's or a checkpoint's name"
    assert run() == "finished"
    assert names(tmp_path / "versions") == ["v000003", "v000004"]
    assert names(tmp_path / "checkpoints") == ["step-000004"]


def test_every_metric_is_documented_and_a_finished_run_reports_no_further_step(tiny_folder, tmp_path, files):
    pools = Pool(*files), Pool(*files)
    for pool in pools:
        assert make_learner(tiny_folder, tmp_path, pool, steps=1).run(threading.Event()) == "finished"
    assert [len(pool.reports) for pool in pools] == [1, 0] and pools[1].policy_version == 1
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/pages.md").read_text(), re.MULTILINE)
    assert set(pools[0].reports[0].metrics) <= {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_a_stop_request_leaves_a_complete_checkpoint(tiny_folder, tmp_path, files):
    stop = threading.Event()

    class Once(Pool):
        def post(self, *args: Any) -> Any:
            stop.set()
            return super().post(*args)

    assert make_learner(tiny_folder, tmp_path, Once(*files), steps=3).run(stop) == "stopped"
    assert names(tmp_path / "checkpoints") == ["step-000001"]


# --- bad files -------------------------------------------------------------------------------------------


class Mixed(Pool):
    """The batch of step 3 has two groups of a malformed file, one group that is too old, and two good groups."""

    def get(self, path: str, kind: Any) -> Any:
        batch = super().get(path, kind)
        numbers = [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
        groups = [
            each.model_copy(update={"submission": submission(n), "group": group})
            for each, (n, group) in zip(batch.groups, numbers, strict=True)
        ]
        return batch.model_copy(update={"groups": groups})


def test_a_step_counts_and_skips_broken_and_old_groups(tiny_folder, tmp_path, files):
    make_learner(tiny_folder, tmp_path, Pool(*files), steps=3).run(threading.Event())
    old = accepted(2, version=0, rows=rollouts(5, 4))
    pool = Mixed(files[0], b"broken", old, files[3])
    make_learner(tiny_folder, tmp_path, pool, steps=4).run(threading.Event())
    [report] = pool.reports
    assert (report.metrics["data/quarantined"], report.metrics["async/refused"]) == (2.0, 1.0)
    assert report.trained == [submission(3)] * 2
    assert names(tmp_path / "quarantine") == [f"{submission(1)}.parquet"]
    assert (tmp_path / "versions/v000004").exists()
    progress = json.loads((tmp_path / "checkpoints/step-000004/progress.json").read_text())
    assert progress["trained"] == [submission(0), submission(1), submission(2), submission(3)]


def test_a_sequence_longer_than_a_row_is_trained_on(tiny_folder, tmp_path):
    rows = [replace(row, prompt=[*range(4, 50), row.group + 4]) for row in rollouts(5, 4)]
    pool = Pool(accepted(version=0, rows=rows))
    assert make_learner(tiny_folder, tmp_path, pool, steps=1, row_tokens=16).run(threading.Event()) == "finished"
    assert len(pool.reports[0].trained) == 5


def test_a_step_in_which_all_rewards_are_equal_changes_no_weight(tiny_folder, tmp_path):
    pool = Pool(accepted(version=0, rows=[replace(row, reward=1.0) for row in rollouts(5, 4)]))
    loss = {"loss": {"beta": 0.0, "entropy": 0.0}}
    make_learner(tiny_folder, tmp_path, pool, steps=1, **loss).run(threading.Event())
    [report] = pool.reports
    assert (report.metrics["optim/grad_norm"], report.metrics["perf/mfu"]) == (0.0, 0.0)
    assert "policy/entropy" not in report.metrics
    before, after = versions(tmp_path).values()
    assert before == after


def test_a_step_without_usable_groups_is_skipped_and_reported(tiny_folder, tmp_path, files):
    pool = Pool(files[0], b"broken", accepted(2, version=2, rows=rollouts(5, 4), by=STRANGER), files[3])
    assert make_learner(tiny_folder, tmp_path, pool, steps=4).run(threading.Event()) == "finished"
    result = versions(tmp_path)
    assert result["v000001"] == result["v000002"] == result["v000003"] != result["v000004"]
    assert [report.metrics["optim/skipped"] for report in pool.reports] == [0.0, 1.0, 1.0, 0.0]
    assert (pool.reports[1].metrics["data/quarantined"], pool.reports[2].metrics["data/foreign"]) == (5.0, 5.0)
    assert not pool.reports[1].trained


def test_several_skipped_steps_in_a_row_stop_the_run(tiny_folder, tmp_path, files):
    pool = Pool(files[0], *[b"broken"] * (MAX_SKIPS + 1))
    for _ in range(2):  # the second run is a restart
        with pytest.raises(ShoalError, match=r"step 5: .*5 are in damaged files.* The 3 steps before"):
            make_learner(tiny_folder, tmp_path, pool, steps=5).run(threading.Event())
    assert len(pool.reports) == 1 + MAX_SKIPS


def test_impossible_unchecked_logprobs_change_neither_training_nor_metrics(tiny_folder, tmp_path):
    spoilt = [replace(row, logprobs=[-9999.0] * len(row.logprobs)) if i % 5 < 2 else row for i, row in enumerate(FILE)]
    pools = []
    for rows in (spoilt, FILE):
        pools.append(Pool(accepted(version=0, rows=rows, prefilled=False)))
        make_learner(tiny_folder, tmp_path / str(len(pools)), pools[-1], steps=1).run(threading.Event())
    training = ("policy/", "loss", "optim/", "data/")
    figures = [{k: v for k, v in pool.reports[0].metrics.items() if k.startswith(training)} for pool in pools]
    assert figures[0] == figures[1] and figures[0]["data/implausible"] == 0.0
    assert all(math.isfinite(value) for value in figures[0].values())
    assert versions(tmp_path / "1") == versions(tmp_path / "2")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files are read from Linux's /proc")
def test_folders_are_fsynced_before_they_get_their_final_name(tiny_folder, tmp_path, files, monkeypatch):
    """A restarted learner does not rewrite a version, so the version must be complete even after a power cut."""
    done: list[str] = []
    rename, fsync = Path.rename, os.fsync

    def renamed(path: Path, to: Path) -> Path:
        done.append(f"rename {Path(to).relative_to(tmp_path)}")
        return rename(path, to)

    def synced(fd: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink().relative_to(tmp_path)}")
        fsync(fd)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    make_learner(tiny_folder, tmp_path, Pool(*files), steps=1).run(threading.Event())
    for folder in ("versions/v000000", "versions/v000001", "model", "checkpoints/step-000001"):
        final = Path(folder)
        at = done.index(f"rename {folder}")
        unfinished = final.with_name(f".{final.name}")
        inside = {f"fsync {unfinished / path.name}" for path in (tmp_path / folder).iterdir()}
        assert inside | {f"fsync {unfinished}"} <= set(done[:at]), folder
        assert done[at + 1] == f"fsync {final.parent}", folder
