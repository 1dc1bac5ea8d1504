"""The audit trains a step again from a checkpoint, with the learner's code, and gets the same weights to the last bit."""

import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.cli.audit import recompute
from shoal.cli.audit.audit import _recompute
from shoal.cli.audit.recompute import Rerun, _distance, _recorded, rerun, rerunnable_steps
from shoal.cli.audit.run import BrokenError, Checks
from shoal.files import file_digest
from shoal.learner.groups import gathering, validators
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.report import DOMAIN
from shoal.model import numerics
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.messages import Batch, StepRecord
from shoal.shardcast.origin import Origin

from ...learner.support import Pool, run_config, step_file

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3
Edit = Callable[[Tensor, Tensor], Tensor]


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


def test_steps_of_several_sites_are_not_trained_again(audited: Any) -> None:
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
        yield Rerun(scratch, "float32", "same", compared=step < 2, state_compared=step == 1)

    monkeypatch.setattr(recompute, "rerun", trained_again)
    state: Any = SimpleNamespace(records=audited.records, configs=audited.configs, rejected={}, accepted={})
    state.checks = Checks()
    _recompute(audited.run, state, STEPS, 0, Random(0), lambda line: None)
    claims = "states of the optimizer: that before step 2 is the learner's claim"
    assert state.checks.unproven == {claims: 1} and state.checks.passed == 3
    assert sum(state.checks.needed.values()) == 1, "one of the requested steps was not compared"


# --- a learner on another machine ------------------------------------------------------------------------------------

STEP = 1  # trained again here


def elsewhere(audited: Any, folder: Path, edit: Edit, *, keep: bool = True, **computed: Any) -> tuple[Any, Any]:
    """Let the learner publish other weights after STEP, and describe its machine otherwise. Return run and state.

    `edit`: makes a tensor from those before and after the step. `keep`: whether these weights are kept.
    """
    shutil.copytree(audited.run.folder, folder)
    before, after = (folder / "learner" / "versions" / f"v{STEP + n:06d}" / "model.safetensors" for n in (0, 1))
    earlier = load_file(before)
    save_file({name: edit(earlier[name], tensor) for name, tensor in load_file(after).items()}, after)
    shutil.rmtree(folder / "learner" / "checkpoints" / f"step-{STEP + 1:06d}")
    records = list(audited.records)
    machine = records[STEP].computed.model_copy(update={"machine": "another"} | computed)
    records[STEP] = records[STEP].model_copy(update={"computed": machine, "after": file_digest(after)})
    if not keep:
        shutil.rmtree(after.parent)
    return SimpleNamespace(folder=folder), SimpleNamespace(records=records, configs=audited.configs)


def moved(before: Tensor, after: Tensor, share: float) -> Tensor:
    return (before.float() + (after.float() - before.float()) * share).to(after.dtype)


def test_an_update_that_differs_by_rounding_passes(audited: Any, tmp_path: Path) -> None:
    run, state = elsewhere(audited, tmp_path / "run", lambda before, after: moved(before, after, 1.05))
    with rerun(run, state, STEP, tmp_path) as result:
        assert result.compared and not result.state_compared and result.outcome.startswith("other bits result here")


LIES: dict[str, Edit] = {
    "not trained": lambda before, after: before,
    "scaled": lambda before, after: after * 0.9,
    "trained half as much": lambda before, after: moved(before, after, 0.5),
    "trained backwards": lambda before, after: moved(before, after, -1.0),
    "not a number": lambda before, after: after * math.nan,
    "infinite": lambda before, after: after * math.inf,
    "another type": lambda before, after: after.double(),
    "another shape": lambda before, after: after.flatten()[:1],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_learner_that_names_another_machine_must_still_have_trained(audited: Any, tmp_path: Path, lie: str) -> None:
    run, state = elsewhere(audited, tmp_path / "run", LIES[lie])
    with pytest.raises(BrokenError, match="does not give the published weights of version 2"):  # noqa: SIM117
        with rerun(run, state, STEP, tmp_path):
            pass


@pytest.mark.parametrize(
    "computed",
    [pytest.param({"threads": 2}, marks=pytest.mark.slow), {"ranks": 2}, {"torch": "9.9"}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_no_description_of_a_machine_turns_the_comparison_off(
    audited: Any, tmp_path: Path, computed: dict[str, Any]
) -> None:
    run, state = elsewhere(audited, tmp_path / "run", LIES["scaled"], **computed)
    with pytest.raises(BrokenError, match="does not give the published weights"):  # noqa: SIM117
        with rerun(run, state, STEP, tmp_path):
            pass


def test_other_weights_that_are_gone_are_not_compared(audited: Any, tmp_path: Path) -> None:
    run, state = elsewhere(audited, tmp_path / "run", LIES["scaled"], keep=False)
    with rerun(run, state, STEP, tmp_path) as result:
        assert not result.compared and "the weights of version 2 are gone" in result.outcome


def test_weights_that_the_learner_deleted_follow_from_the_origins_delta(audited: Any, tmp_path: Path) -> None:
    run, _ = elsewhere(audited, tmp_path / "run", LIES["scaled"])
    versions = run.folder / "learner" / "versions"
    origin = Origin(run.folder / "origin" / "store", Identity.generate().private_key, run="r")
    for version in (STEP, STEP + 1):
        origin.publish(versions / f"v{version:06d}", version)
    origin.store.unlock()
    digest = file_digest(versions / f"v{STEP + 1:06d}" / "model.safetensors")
    before = Path(shutil.copytree(versions / f"v{STEP:06d}", tmp_path / "versions" / "before"))
    shutil.rmtree(versions)
    made = _recorded(run, STEP + 1, digest, before)
    assert made is not None and file_digest(made / "model.safetensors") == digest
    shutil.rmtree(made)
    with pytest.raises(BrokenError, match="the origin published weights that differ from the learner's record"):
        _recorded(run, STEP + 1, "0" * 64, before)


@pytest.mark.parametrize(
    ("recorded", "distance"),
    [
        ([1.0, 1.0, 2.0], 0.0),
        ([1.0078125, 1.0, 2.0], 1.0),  # the learner's master must have moved by more than its update
        ([1.0, 1.0078125, 2.0], 0.0),  # the master is so near to the middle of two bf16 numbers that it may round up
        ([1.0, 1.0, 2.015625], 2.0),
        ([1.0, 1.0, 1.9921875], 1.0),  # not trained
    ],
)
def test_only_a_master_near_the_middle_may_round_to_another_weight(
    tmp_path: Path, recorded: list[float], distance: float
) -> None:
    before, after = torch.tensor([1.0, 1.0038, 1.995]), torch.tensor([1.001, 1.0039, 1.997])
    policy: Any = SimpleNamespace(masters={"w": after})
    for name, values in (("here", [1.0, 1.0, 2.0]), ("kept", recorded)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor(values).bfloat16()}, tmp_path / name / "model.safetensors")
    measured = _distance(policy, {"w": before}, tmp_path / "here", tmp_path / "kept")
    assert measured == pytest.approx(distance)
