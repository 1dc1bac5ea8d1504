"""Several ranks train as one rank does. They are real processes under torchrun, over gloo, sharded by FSDP2.

The gradient of a single row is the same on every rank, in both dtypes. Only the order in which the rows' gradients are
added in float32 may differ, which changes each sum by a relative 1e-7. Over a few updates, losses and norms differ by
1e-4. A weight moves by lr * m / sqrt(v), whatever the size of the gradient. So if a gradient is only rounding error,
its weight may move either way. If a master is almost halfway between two bf16 numbers, two runs may round it to
different ones, which are one bf16 step apart (2**-8 of the weight). The tests require that a published weight differs
between two runs by at most lr plus one such step, and that all but one weight in a thousand are equal bit for bit. In
bfloat16 this holds for only two updates, because one different weight changes the rounding of the next forward pass.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.learner.ranks import Ranks, whole
from shoal.model.load import INDEX, save_model
from shoal.protocol.messages import StepReport

from ..conftest import tiny_llama, tiny_tokenizer
from ..model import architectures
from .support import SETTINGS, VALIDATOR, Pool, make_learner, make_policy, step_file

ROOT = Path(__file__).parents[2]
STEPS = 3
CHANGED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "lora": {"lora": {"rank": 4}, "activation_checkpointing": True},
}
RUNS = list(CHANGED)
SHARDED: dict[str, tuple[str, dict[str, Any]]] = {  # name of a model in `models`, and the settings of its policy
    "tied": ("tied", {"dtype": "bfloat16", "loss": {"beta": 0.01}}),
    "untied": ("untied", {}),
    "lora": ("tied", {"lora": {"rank": 4}}),
    "published": ("adapters", {"lora": {"rank": 4}}),
}
QUICK = ["tied"]  # checked on two ranks; slow tests check all on four ranks
SUMS = ("loss", "optim/grad_norm", "policy/entropy", "policy/kl", "policy/mismatch_kl", "policy/clip_low")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for step in range(STEPS):
        (folder / f"{step}.parquet").write_bytes(step_file(step))
    return folder


def length_of(name: str) -> dict[str, Any]:
    """Return the number of steps and the dtype of this run."""
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    return {"steps": STEPS if name == "float32" else 2, "dtype": dtype}


def job(model: Path, files: Path, out: Path, name: str) -> dict[str, Any]:
    where = {"model": str(model), "out": str(out), "files": str(files), "validator": VALIDATOR.public}
    return where | length_of(name) | {"changed": CHANGED[name], "die": {}}


def pool(files: Path) -> Pool:
    return Pool(*(path.read_bytes() for path in sorted(files.iterdir())))


def torchrun(n: int, folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run these jobs in turn on `n` ranks."""
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
    """Copy a run's folder, remove what its last step wrote, and return the copy."""
    shutil.copytree(out, to)
    shutil.rmtree(to / f"checkpoints/step-{STEPS:06d}")
    for version in (STEPS - 1, STEPS):
        shutil.rmtree(to / f"versions/v{version:06d}")
    return to


@pytest.fixture(scope="module")
def alone(tiny_folder, files, tmp_path_factory, one_thread) -> Path:
    """A folder with the runs on one rank. Each run has a folder with its name."""
    folder = tmp_path_factory.mktemp("alone")
    for name in RUNS:
        node = pool(files)
        make_learner(tiny_folder, folder / name, node, **length_of(name), **CHANGED[name]).run(threading.Event())
        posted = [report.model_dump() for report in node.reports]
        (folder / name / "reports.json").write_text(json.dumps(posted))
    return folder


@pytest.fixture(scope="module")
def models(tiny_folder, tmp_path_factory) -> dict[str, Path]:
    """The models that are loaded in shards, by name."""
    folder = tmp_path_factory.mktemp("models")
    # The 61 rows of the embedding cannot be divided equally among the ranks.
    untied = tiny_llama(2, tie_word_embeddings=False, vocab_size=61, num_hidden_layers=3)
    untied.save_pretrained(folder / "untied", max_shard_size="500KB")  # float32, in several files
    assert (folder / "untied" / INDEX).exists()
    tiny_llama(3, tie_word_embeddings=False, num_hidden_layers=16).save_pretrained(folder / "deep")
    adapted = make_policy(tiny_folder, lora={"rank": 4})
    save_model(adapted.model, adapted.tokenizer, folder / "adapters", adapted.published(), adapted.stored)
    architectures.create(folder / "qwen2_moe", "qwen2_moe")
    for each in folder.iterdir():
        tiny_tokenizer().save_pretrained(each)
    return {"tied": tiny_folder} | {each.name: each for each in folder.iterdir()}


def checks(models: dict[str, Path], folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Return jobs that run checks of `sharding`."""
    made = [("loads", name, *SHARDED[name]) for name in names]
    made += [("memory", "memory", "deep", {})]
    made += [] if names == QUICK else [("renamed", "renamed", "qwen2_moe", {})]
    return [
        {"check": check, "model": str(models[model]), "out": str(folder / "checks" / name), "settings": settings}
        for check, name, model, settings in made
    ]


@pytest.fixture(scope="module")
def two(tiny_folder, files, models, tmp_path_factory) -> Path:
    """A folder with the runs and checks on two ranks. Each has a folder with its name."""
    folder = tmp_path_factory.mktemp("two")
    torchrun(
        2, folder, [*(job(tiny_folder, files, folder / name, name) for name in RUNS), *checks(models, folder, QUICK)]
    )
    return folder


@pytest.fixture(scope="module")
def four(tiny_folder, files, models, two, tmp_path_factory) -> Path:
    """A folder with the runs and checks on four ranks. The run `resumed` repeats the two ranks' last step."""
    folder = tmp_path_factory.mktemp("four")
    jobs = [job(tiny_folder, files, folder / name, name) for name in RUNS]
    resumed = without_last_step(two / "float32", folder / "resumed")
    torchrun(4, folder, [*jobs, job(tiny_folder, files, resumed, "float32"), *checks(models, folder, list(SHARDED))])
    return folder


def reports(out: Path) -> list[StepReport]:
    return [StepReport(**fields) for fields in json.loads((out / "reports.json").read_text())]


def version(out: Path, number: int) -> dict[str, torch.Tensor]:
    return load_file(out / f"versions/v{number:06d}/model.safetensors")


def assert_same_weights(
    result: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], max_frac: float = 1e-3
) -> None:
    assert list(result) == list(wanted)
    a, b = (torch.cat([weights[name].flatten().float() for name in wanted]) for weights in (result, wanted))
    assert bool(((a - b).abs() <= SETTINGS["lr"] + 2**-8 * b.abs()).all())  # type: ignore[operator]
    assert float((a != b).float().mean()) < max_frac


def assert_same_run(result: Path, wanted: Path) -> None:
    """Compare two runs. Each step has five rows, which cannot be divided equally among two or four ranks."""
    expected = reports(wanted)
    for report, other in zip(reports(result), expected, strict=True):
        for name in SUMS:
            assert report.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-6), name
        assert report.metrics["perf/tokens"] == other.metrics["perf/tokens"]
        assert report.trained == other.trained
    for number in range(len(expected) + 1):
        assert_same_weights(version(result, number), version(wanted, number))


def cases(quick: Iterable[str], every: Iterable[str]) -> list[Any]:
    """Return test parameters: the names in `quick` on two ranks, and those in `every` on four ranks, in slow tests."""
    four = [pytest.param("four", name, marks=pytest.mark.slow) for name in every]
    return [*(("two", name) for name in quick), *four]


@pytest.mark.parametrize(("ranks", "name"), cases(RUNS, RUNS))
def test_several_ranks_train_as_one_does(request, alone, ranks, name):
    assert_same_run(request.getfixturevalue(ranks) / name, alone / name)


def test_each_step_changes_the_published_weights(alone):
    """If no step changed them, the test above would also pass for ranks that train nothing."""
    for number in range(STEPS):
        before, after = version(alone / "float32", number), version(alone / "float32", number + 1)
        assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2


def test_a_checkpoint_of_two_ranks_resumes_on_one_rank(tiny_folder, files, two, tmp_path):
    out = without_last_step(two / "float32", tmp_path / "resumed")
    make_learner(tiny_folder, out, node := pool(files), steps=STEPS).run(threading.Event())
    assert_continued(out, two / "float32", node.reports)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_four_ranks(four, two):
    assert_continued(four / "resumed", two / "float32", reports(four / "resumed"))


def assert_continued(out: Path, straight: Path, posted: list[StepReport]) -> None:
    resumed_at = STEPS - 1
    files = [(run / f"versions/v{resumed_at:06d}/model.safetensors").read_bytes() for run in (out, straight)]
    assert files[0] == files[1]  # written from the checkpoint, which stores exact weights
    assert_same_weights(version(out, STEPS), version(straight, STEPS))
    [report], wanted = posted, reports(straight)[-1]
    assert report.step == resumed_at
    for name in SUMS:
        assert report.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, abs=1e-6), name


# --- loading and publishing in shards -------------------------------------------------------------------------------


def findings(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the result of this check on each rank."""
    return [json.loads(path.read_text()) for path in sorted((folder / "checks" / name).iterdir())]


@pytest.mark.parametrize(("ranks", "name"), cases(QUICK, SHARDED))
def test_loading_in_shards_gives_the_same_bits_as_loading_whole(request, ranks, name):
    for rank, result in enumerate(findings(request.getfixturevalue(ranks), name)):
        assert result["sharded"] and result["loaded whole"], "one policy must be loaded in shards and the other whole"
        assert result["differ"] == []
        assert result["generation"] and result["tied"] == (name != "untied")
        assert rank == 0 or result["published elsewhere"] == 0


@pytest.mark.parametrize(("ranks", "name"), cases(["memory"], ["memory"]))
def test_no_rank_reads_or_keeps_more_than_its_share(request, ranks, name):
    """Two of 16 blocks are gathered at a time (one in use, one prefetched), besides the tensors outside of the blocks."""
    results = findings(request.getfixturevalue(ranks), name)
    for result in results:
        share = result["whole_bytes"] / len(results)
        # Each tensor is read once to compare and once to train.
        assert result["read_bytes"] == pytest.approx(2 * result["stored_bytes"] / len(results), rel=0.01)
        assert share < result["compared_bytes"] < share + 0.35 * result["whole_bytes"]
        assert result["peak_bytes"] < share + 0.35 * result["whole_bytes"]
    assert sum(result["read_bytes"] for result in results) == 2 * results[0]["stored_bytes"]
    assert len(results) == {"two": 2, "four": 4}[ranks]


@pytest.mark.slow
def test_a_model_with_other_tensor_names_is_loaded_whole(four):
    for result in findings(four, "renamed"):
        assert result["whole"] and "name tensors differently from transformers" in result["why"]


@pytest.mark.parametrize("name", ["float32", "lora"])
def test_two_ranks_publish_the_same_files_as_one(two, alone, name):
    """Only the first version is compared, because later versions differ by rounding."""
    versions = [folder / name / "versions/v000000" for folder in (two, alone)]
    first, second = ({path.name: path.read_bytes() for path in version.iterdir()} for version in versions)
    assert first.keys() == second.keys()
    assert [file for file in first if first[file] != second[file]] == []


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_without_torchrun_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.start(timeout_s=1, leader_timeout_s=1)
    assert (ranks.rank, ranks.size, ranks.leads) == (0, 1, True)
    assert ranks.broadcast(b"\x00x") == b"\x00x" and ranks.sum({"b": 1.5, "a": 2.0}) == {"b": 1.5, "a": 2.0}
    assert whole(tensor := torch.ones(2)) is tensor
    ranks.stop()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_every_item_goes_to_one_rank_and_shares_have_equal_length(n, size):
    shares = [Ranks(rank, size).scatter(list(range(n))) for rank in range(size)]
    assert sorted(item for share in shares for item in share if item is not None) == list(range(n))
    assert {len(share) for share in shares} == {-(-n // size)}
