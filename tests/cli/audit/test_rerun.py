"""The audit trains a step again from a checkpoint, with the learner's code, and gets the same weights to the last bit."""

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.cli.audit import recompute
from shoal.cli.audit.audit import _recompute
from shoal.cli.audit.recompute import Rerun, rerun, rerunnable_steps
from shoal.cli.audit.run import BrokenError
from shoal.learner.groups import gathering, validators
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.report import DOMAIN
from shoal.model import numerics
from shoal.protocol.identity import Signed
from shoal.protocol.messages import Batch, StepRecord

from ...learner.support import Pool, run_config, step_file

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    return run(tiny_folder, tmp_path_factory.mktemp("trained"))


def run(tiny_folder: Path, folder: Path, **changed: Any) -> Any:
    """Train three steps and keep every checkpoint. Return the run, with what an audit would read from its ledger."""
    config = run_config(STEPS, {"checkpoint_every": 1} | changed)
    config = config.model_copy(update={"model": config.model.model_copy(update={"name": str(tiny_folder)})})
    pool = Pool(*[step_file(step) for step in range(STEPS)])
    torch.manual_seed(config.run.seed)
    picked = numerics.pick(config.model.numerics, "float32", "cpu")
    policy = Policy(tiny_folder, config.learner, "float32", "cpu", config.sampling.temperature, Ranks(), picked)
    learner = Learner(pool, config, policy, folder / "learner")  # type: ignore[arg-type]
    assert learner.run(threading.Event()) == "finished"
    signed = [Signed.model_validate_json(report.record) for report in pool.reports]
    records = [StepRecord.model_validate_json(each.open(each.key, domain=DOMAIN)) for each in signed]
    batches = [pool.get(f"/v1/batches/{step}", Batch) for step in range(STEPS)]
    groups = [
        gathering(pool, config, folder / "quarantine").gather(batch, validators(pool))  # type: ignore[arg-type]
        for batch in batches
    ]
    return SimpleNamespace(run=SimpleNamespace(folder=folder), records=records, configs=[config] * STEPS, groups=groups)


@pytest.fixture
def audited(trained: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(recompute, "gather_step", lambda run, audited, step: trained.groups[step])
    return trained


def test_each_step_after_a_checkpoint_can_be_trained_again(audited: Any, tmp_path: Path) -> None:
    assert rerunnable_steps(audited.run, audited) == [0, 1, 2]
    partial = shutil.copytree(audited.run.folder, tmp_path / "partial")
    shutil.rmtree(partial / "learner" / "checkpoints" / "step-000001")
    assert rerunnable_steps(SimpleNamespace(folder=partial), audited) == [0, 2]  # type: ignore[arg-type]


def test_steps_of_several_ranks_or_sites_are_not_trained_again(audited: Any) -> None:
    ranks = [
        each.model_copy(update={"computed": each.computed.model_copy(update={"ranks": 2})}) for each in audited.records
    ]
    assert rerunnable_steps(audited.run, SimpleNamespace(records=ranks, configs=audited.configs)) == []  # type: ignore[arg-type]
    config = audited.configs[0]
    sites = config.model_copy(update={"learner": config.learner.model_copy(update={"sites": 2})})
    spread = SimpleNamespace(records=audited.records, configs=[sites] * STEPS)
    assert rerunnable_steps(audited.run, spread) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.slow) for step in (0, 1)), 2])
def test_a_step_trained_again_gives_the_same_weights(audited: Any, tmp_path: Path, step: int) -> None:
    with rerun(audited.run, audited, step, tmp_path) as result:
        assert result.compared and result.state_compared and result.before.is_dir()
    kept = audited.run.folder / "learner" / "versions"
    for version in (step, step + 1):
        name = f"v{version:06d}/model.safetensors"
        assert (tmp_path / "versions" / name).read_bytes() == (kept / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("field", ["before", "after"])
def test_weights_that_do_not_follow_from_a_kept_checkpoint_are_named(audited: Any, tmp_path: Path, field: str) -> None:
    records = list(audited.records)
    records[1] = records[1].model_copy(update={field: "0" * 64})
    lied = SimpleNamespace(records=records, configs=audited.configs)
    version = 1 if field == "before" else 2
    with pytest.raises(BrokenError, match=f"weights of version {version}"):  # noqa: SIM117
        with rerun(audited.run, lied, 1, tmp_path):  # type: ignore[arg-type]
            pass


def test_a_different_state_before_the_step_gives_different_weights(audited: Any, tmp_path: Path) -> None:
    """The learner might sign a checkpoint of a state that it was never in."""
    other = SimpleNamespace(folder=shutil.copytree(audited.run.folder, tmp_path / "run"))
    checkpoints = other.folder / "learner" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000002")
    shutil.copytree(checkpoints / "step-000001", checkpoints / "step-000002")
    with pytest.raises(BrokenError) as broken:  # noqa: SIM117
        with rerun(other, audited, 2, tmp_path / "scratch"):  # type: ignore[arg-type]
            pass
    assert broken.value.link == "step 3"


def test_a_false_state_of_the_optimizer_after_the_step_is_named(audited: Any, tmp_path: Path) -> None:
    """From it, the learner could train the next step to weights of its choice."""
    other = SimpleNamespace(folder=shutil.copytree(audited.run.folder, tmp_path / "run"))
    [path] = (other.folder / "learner" / "checkpoints" / "step-000003").glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("exp_avg."))
    save_file(tensors | {name: tensors[name] + 1}, path)
    with pytest.raises(BrokenError, match=f"the checkpoint step-000003: {re.escape(name)} differs"):  # noqa: SIM117
        with rerun(other, audited, 2, tmp_path / "scratch"):  # type: ignore[arg-type]
            pass


def test_the_report_names_a_state_that_only_the_learner_vouches_for(
    audited: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def trained_again(run: Any, state: Any, step: int, scratch: Path) -> Iterator[Any]:
        learner = audited.records[step].computed
        yield Rerun(step, scratch, here=learner, learner=learner, state_compared=step > 0)

    monkeypatch.setattr(recompute, "rerun", trained_again)
    state: Any = SimpleNamespace(records=audited.records, configs=audited.configs, rejected={}, accepted={})
    lines: list[str] = []
    _recompute(audited.run, state, STEPS, 0, Random(0), lines.append)
    claims = [line for line in lines if "claim" in line]
    assert claims == ["step 2: the optimizer's state before it is the learner's claim"]


@pytest.mark.slow
def test_nothing_is_compared_on_a_machine_with_different_numerics(audited: Any, tmp_path: Path) -> None:
    other = audited.records[1].computed.model_copy(update={"machine": "another"})
    records = list(audited.records)
    records[1] = records[1].model_copy(update={"computed": other, "after": "0" * 64})
    elsewhere = SimpleNamespace(records=records, configs=audited.configs)
    with rerun(audited.run, elsewhere, 1, tmp_path) as result:  # type: ignore[arg-type]
        assert not result.compared and not result.state_compared
