"""Several ranks train like one: real processes under torchrun, over gloo, sharded by FSDP2.

Only the order in which the rows' gradients are added up in float32 may differ, about 1e-7 of each. Each row's own gradient
is the same on every rank, in both dtypes. Over a few updates losses and norms differ by 1e-4. A weight moves by
lr * m / sqrt(v), which does not depend on the gradient's size. So if a gradient is only rounding, its weight may move either
way, by at most 2 * lr per update. A master halfway between two bf16 numbers may be published as either, one bf16 step
apart (2**-8 of it). So each published weight must lie within lr + one step, and all but one in a thousand must be equal
bit for bit. In bfloat16 this holds for two updates: one different weight changes the rounding of the next forward.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.learner.ranks import Ranks, whole
from shoal.protocol.messages import StepReport

from .support import SETTINGS, VALIDATOR, Pool, make_learner, step_file

ROOT = Path(__file__).parents[2]
STEPS = 3
CHANGED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "lora": {"lora": {"rank": 4}, "behaviour_logprobs": "recomputed", "activation_checkpointing": True},
}
RUNS = list(CHANGED)
SUMS = ("loss", "optim/grad_norm", "policy/entropy", "policy/kl", "policy/mismatch_kl", "policy/clip_low")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for step in range(STEPS):
        (folder / f"{step}.parquet").write_bytes(step_file(step))
    return folder


def of(name: str) -> dict[str, Any]:
    """Steps and dtype of the run. All but one take two steps."""
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    return {"steps": STEPS if name == "float32" else 2, "dtype": dtype}


def job(model: Path, files: Path, out: Path, name: str) -> dict[str, Any]:
    where = {"model": str(model), "out": str(out), "files": str(files), "validator": VALIDATOR.public}
    return where | of(name) | {"changed": CHANGED[name], "die": {}}


def torchrun(n: int, folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run these jobs one after the other on `n` ranks."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    command += ["-m", "tests.learner.process", str(path)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as started:
        try:
            output, _ = started.communicate(timeout=300)
        except BaseException:
            started.terminate()  # torchrun ends its ranks
            raise
    assert started.returncode == 0, output.decode()[-6000:]


def without_last_step(out: Path, to: Path) -> Path:
    """A copy of a run's folder as it was before the last step, without that step's version."""
    shutil.copytree(out, to)
    shutil.rmtree(to / f"checkpoints/step-{STEPS:06d}")
    for version in (STEPS - 1, STEPS):
        shutil.rmtree(to / f"versions/v{version:06d}")
    return to


@pytest.fixture(scope="module")
def alone(tiny_folder: Path, files: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """One rank's runs, by name."""
    folder = tmp_path_factory.mktemp("alone")
    for name in RUNS:
        pool = Pool(*(path.read_bytes() for path in sorted(files.iterdir())))
        make_learner(tiny_folder, folder / name, pool, **of(name), **CHANGED[name]).run(threading.Event())
        posted = [report.model_dump() for report in pool.reports]
        (folder / name / "reports.json").write_text(json.dumps(posted))
    return folder


@pytest.fixture(scope="module")
def two(tiny_folder: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks' runs, by name."""
    folder = tmp_path_factory.mktemp("two")
    torchrun(2, folder, [job(tiny_folder, files, folder / name, name) for name in RUNS])
    return folder


@pytest.fixture(scope="module")
def four(tiny_folder: Path, files: Path, two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks' runs, by name, and one that resumes from two ranks' last checkpoint but one."""
    folder = tmp_path_factory.mktemp("four")
    jobs = [job(tiny_folder, files, folder / name, name) for name in RUNS]
    resumed = without_last_step(two / "float32", folder / "resumed")
    torchrun(4, folder, [*jobs, job(tiny_folder, files, resumed, "float32")])
    return folder


def reports(out: Path) -> list[StepReport]:
    return [StepReport(**fields) for fields in json.loads((out / "reports.json").read_text())]


def version(out: Path, number: int) -> dict[str, torch.Tensor]:
    return load_file(out / f"versions/v{number:06d}/model.safetensors")


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    a, b = (torch.cat([weights[name].flatten().float() for name in wanted]) for weights in (found, wanted))
    assert bool(((a - b).abs() <= SETTINGS["lr"] + 2**-8 * b.abs()).all())  # type: ignore[operator]
    assert float((a != b).float().mean()) < 1e-3


def assert_same_run(found: Path, wanted: Path) -> None:
    """Steps of five rows each: no number of ranks here divides them."""
    expected = reports(wanted)
    for one, other in zip(reports(found), expected, strict=True):
        for name in SUMS:
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-6), name
        assert one.metrics["perf/tokens"] == other.metrics["perf/tokens"]
        assert one.trained == other.trained
    for number in range(len(expected) + 1):
        assert_same_weights(version(found, number), version(wanted, number))


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one_does(two: Path, alone: Path, name: str) -> None:
    assert_same_run(two / name, alone / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_four_ranks_train_as_one_does(four: Path, alone: Path, name: str) -> None:
    assert_same_run(four / name, alone / name)


def test_each_step_changes_the_published_weights(alone: Path) -> None:
    """Without this, the tests above would also pass for ranks that train nothing."""
    for number in range(STEPS):
        before, after = version(alone / "float32", number), version(alone / "float32", number + 1)
        assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2


def test_two_ranks_checkpoint_resumes_on_one(tiny_folder: Path, files: Path, two: Path, tmp_path: Path) -> None:
    out = without_last_step(two / "float32", tmp_path / "resumed")
    pool = Pool(*(path.read_bytes() for path in sorted(files.iterdir())))
    make_learner(tiny_folder, out, pool, steps=STEPS).run(threading.Event())
    assert_continued(out, two / "float32", pool.reports)


@pytest.mark.slow
def test_two_ranks_checkpoint_resumes_on_four(four: Path, two: Path) -> None:
    assert_continued(four / "resumed", two / "float32", reports(four / "resumed"))


def assert_continued(out: Path, straight: Path, posted: list[StepReport]) -> None:
    resumed_at = STEPS - 1
    files = [(run / f"versions/v{resumed_at:06d}/model.safetensors").read_bytes() for run in (out, straight)]
    assert files[0] == files[1]  # made from the checkpoint, which loses nothing
    assert_same_weights(version(out, STEPS), version(straight, STEPS))
    [report], wanted = posted, reports(straight)[-1]
    assert report.step == resumed_at
    for name in SUMS:
        assert report.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.skipif("lora" not in RUNS, reason="peft is not installed: pip install peft")
def test_two_ranks_keep_the_whole_adapter(two: Path, alone: Path) -> None:
    found, wanted = (load_file(run / "lora/adapter/adapter_model.safetensors") for run in (two, alone))
    assert found.keys() == wanted.keys()
    assert all(found[name].shape == wanted[name].shape for name in wanted)
    assert all(bool(found[name].any()) for name in wanted)


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.start(timeout_s=1, leader_timeout_s=1)
    assert (ranks.rank, ranks.size, ranks.leads) == (0, 1, True)
    assert ranks.broadcast(b"\x00x") == b"\x00x" and ranks.broadcast(b"") == b""
    assert ranks.sum({"b": 1.5, "a": 2.0}) == {"b": 1.5, "a": 2.0}
    assert ranks.scatter([1, 2, 3]) == [1, 2, 3] and ranks.scatter([]) == []
    assert whole(tensor := torch.ones(2)) is tensor
    ranks.stop()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_every_item_goes_to_one_rank_and_shares_have_equal_length(n: int, size: int) -> None:
    shares = [Ranks(rank, size).scatter(list(range(n))) for rank in range(size)]
    assert sorted(item for share in shares for item in share if item is not None) == list(range(n))
    assert {len(share) for share in shares} == {-(-n // size)}


def test_only_the_leaders_messages_are_waited_for_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs in a collective ends the run after the short time; an idle pool does not."""
    import torch.distributed as dist

    waits: dict[str, float] = {}
    groups = iter(["checkpoints", "waiting"])

    def new_group(backend: str, timeout: timedelta) -> str:
        name = next(groups)
        waits[name] = timeout.total_seconds()
        return name

    used: list[Any] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, timeout: waits.update(collectives=timeout.total_seconds())
    )
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group=None: used.append(group))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: used.append(group))
    ranks = Ranks.start(60.0, 7 * 86_400.0)
    ranks.broadcast(b"a batch")
    assert waits == {"collectives": 60.0, "checkpoints": 60.0, "waiting": 604_800.0}
    assert used == ["waiting", "waiting"] and ranks.checkpoint_group == "checkpoints"
    ranks.sum({"loss": 1.0})
    assert used[2] is None
