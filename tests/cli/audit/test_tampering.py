"""An audit of a run passes if nothing was changed, and names each change that an attacker, or the coordinator, made."""

import re
import shutil
from pathlib import Path
from random import Random

import pytest
from benchmarks.trust.forgeries import FOLDER, without_tables

from shoal.cli.audit.audit import audit
from shoal.cli.audit.run import BrokenError, Checks
from shoal.config import dumps
from shoal.coordinator import trust
from shoal.coordinator.database import record_start
from shoal.coordinator.pool import TABLE_NAMES

from .recorded import ALICE, BOB, COORDINATOR, NEED, RUN, STEPS, Recorded, check, copy_of, record_run
from .tampering import tamperings


def broken(run: Recorded, message: str) -> BrokenError:
    """Audit an unfinished run. Return its error, which must match `message`."""
    with pytest.raises(BrokenError, match=message) as error:
        audit(run.folder, lambda line: None, Random(0), rerun=0, proofs=0, unsealed=True)
    return error.value


def test_an_unchanged_run_passes_and_its_contributions_are_counted(finished: Path) -> None:
    lines = check(finished)
    assert "steps: 3 trained, each on exactly the groups of its batch" in lines
    assert "tables: as sealed" in lines
    assert any(line.startswith("step 1: alice 2 groups, 12 tokens; mallory 1 groups, 6 tokens") for line in lines)
    assert any(line.startswith("mallory") and line.endswith("slashed") for line in lines)


@pytest.mark.parametrize("need", [NEED - 1, NEED + 1])
def test_a_batch_whose_size_differs_from_the_config_is_named(tmp_path: Path, need: int) -> None:
    run = Recorded(tmp_path / "run")
    section = run.config.coordinator.model_copy(update={"prompts_per_step": need})
    run.pool.batches.config = run.config.model_copy(update={"coordinator": section})
    run.publish(0)
    run.submit(ALICE, 0)
    run.submit(BOB, 0)
    entry = next(run.pool.db.ledger.entries(kind="batch"))
    assert broken(run, "is not a full batch for step 1").link == f"ledger entry {entry.seq}"


def restart(run: Recorded, section: str, **update: object) -> None:
    changed = getattr(run.config, section).model_copy(update=update)
    run.config = run.config.model_copy(update={section: changed})
    record_start(run.pool.db, RUN, COORDINATOR.public, run.config)


def test_a_restart_with_a_config_that_makes_earlier_work_a_lie_is_named(tmp_path: Path) -> None:
    """Otherwise a coordinator could slash a worker for honest work and then restore the config."""
    run = Recorded(tmp_path / "run")
    restart(run, "tasks", length_targets=[5])
    broken(run, r"tasks.length_targets is \[5\], but the work of this run so far was done with \[\]")


def test_other_changes_of_the_config_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(run: Recorded, step: int, before: str) -> str:
        if step == 1:
            restart(run, "validator", sampling_margin=9.0)
        return trained(run, step, before)

    trained = Recorded.train
    monkeypatch.setattr(Recorded, "train", train)
    assert "config: a restart changed validator.sampling_margin from 0.75 to 9.0" in check(record_run(tmp_path / "run"))


def test_a_batch_with_too_many_unchecked_groups_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorded(tmp_path / "run")
    run.publish(0)
    run.submit(ALICE, 0)
    run.pool.judgement.trust.draw = lambda worker, groups: False  # type: ignore[method-assign]
    run.submit(BOB, 0)
    monkeypatch.setattr(trust, "UNCHECKED_SHARE", 0.0)
    broken(run, "has 1 groups that were not prefilled whole")


def test_a_file_that_was_only_partly_prefilled_contrary_to_the_ledger_is_named(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.publish(0)
    run.submit(ALICE, 0, prefilled=False)
    broken(run, "the ledger says that .* was prefilled whole, but its file does not")


@pytest.mark.parametrize("name", FOLDER)
def test_a_deletion_or_an_addition_is_found_although_the_evidence_may_be_gone(
    finished: Path, tmp_path: Path, name: str
) -> None:
    folder = copy_of(finished, tmp_path / "copy")
    FOLDER[name](folder)
    if FOLDER[name] is without_tables:
        checks = Checks()
        audit(folder, lambda line: None, Random(0), rerun=0, proofs=0, export=folder / "x.jsonl", checks=checks)
        assert sum(checks.needed.values()) == len(TABLE_NAMES)
    else:
        with pytest.raises(BrokenError):
            check(folder)


def test_a_finished_model_needs_neither_its_origin_nor_its_learner(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "copy")
    shutil.rmtree(folder / "origin")
    shutil.rmtree(folder / "learner")
    lines = check(folder)
    assert "not compared: 4 versions as the origin serves them: its store is not here" in lines
    assert "not compared: 6 digests of versions and of their weights: their files are gone" in lines
    assert not any(line.startswith("NOT COMPARED") for line in lines)


def test_a_run_that_was_killed_before_it_wrote_its_model_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "finish", lambda run: (run.folder / "config.toml").write_text(dumps(run.config)))
    folder, checks = record_run(tmp_path / "run"), Checks()
    shutil.rmtree(folder / "learner" / "checkpoints" / f"step-{STEPS:06d}")
    audit(folder, lambda line: None, Random(0), rerun=0, proofs=0, unsealed=True, checks=checks)
    assert [what.partition(":")[0] for what in checks.needed] == ["trained models"]
    assert checks.unproven["checkpoints: the last one is not here"] == 1


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_each_change_of_the_folder_is_found_and_named(finished: Path, tmp_path: Path, every: int) -> None:
    all_changes = list(tamperings(finished))
    assert len(all_changes) >= 200
    missed = []
    for number, tampering in list(enumerate(all_changes))[::every]:
        folder = copy_of(finished, tmp_path / "copy")
        tampering.change(folder, Random(number))
        try:
            check(folder)
            missed.append(f"{tampering.name} (seed {number}): not found")
        except BrokenError as error:
            if not re.search(tampering.link, error.link):
                missed.append(f"{tampering.name} (seed {number}): named {error.link!r}, not {tampering.link!r}")
        shutil.rmtree(folder)
    assert missed == []
