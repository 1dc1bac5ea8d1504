from pathlib import Path
from random import Random

import pytest

from shoal.cli.audit.audit import audit
from shoal.cli.audit.opened import BrokenError
from shoal.coordinator import trust
from shoal.coordinator.database import record_start

from .recorded import ALICE, BOB, COORDINATOR, NEED, RUN, Recorded, check, copy_of
from .tampering import tamperings


def caught(folder: Path) -> BrokenError:
    with pytest.raises(BrokenError) as found:
        check(folder)
    return found.value


def missed(finished: Path, scratch: Path, *, every: int, first: int) -> list[str]:
    """Tamperings that the audit lets pass, or whose link it does not name."""
    import re
    import shutil

    found = []
    chosen = list(tamperings(finished))
    assert len(chosen) >= 200
    for number, one in enumerate(chosen):
        if number % every != first:
            continue
        folder = copy_of(finished, scratch / "copy")
        one.change(folder, Random(number))
        try:
            check(folder)
            found.append(f"{one.name} (seed {number}): not found")
        except BrokenError as broken:
            if not re.search(one.link, broken.link):
                found.append(f"{one.name} (seed {number}): named {broken.link!r}, not {one.link!r}")
        shutil.rmtree(folder)
    return found


def test_a_clean_run_passes_and_its_contributions_are_counted(finished: Path) -> None:
    lines = check(finished)
    assert "steps: 3 trained, each on exactly the groups of its batch" in lines
    assert "tables: as sealed" in lines
    assert any(line.startswith("step 1: alice 2 groups, 12 tokens; mallory 1 groups, 6 tokens") for line in lines)
    assert any(line.startswith("mallory") and line.endswith("slashed") for line in lines)


@pytest.mark.parametrize("need", [NEED - 1, NEED + 1])
def test_a_batch_of_another_size_than_the_config_says_is_named(tmp_path: Path, need: int) -> None:
    """By the coordinator's own hand: a later start gives another size, and batches keep the earlier one."""
    run = Recorded(tmp_path / "run")
    section = run.config.coordinator.model_copy(update={"prompts_per_step": need})
    record_start(run.pool.db, RUN, COORDINATOR.public, run.config.model_copy(update={"coordinator": section}))
    run.publish(0)
    run.submit(ALICE, 0)
    run.submit(BOB, 0)
    [entry] = run.pool.db.ledger.entries(kind="batch")
    with pytest.raises(BrokenError, match="is not the batch of step 1") as broken:
        audit(run.folder, lambda line: None, Random(0), rerun=0, proofs=0, unsealed=True)
    assert broken.value.link == f"ledger entry {entry.seq}"


def test_a_batch_with_more_unchecked_groups_than_a_batch_takes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the coordinator's own hand, likewise."""
    run = Recorded(tmp_path / "run")
    run.publish(0)
    run.submit(ALICE, 0)
    run.pool.judgement.trust.draw = lambda worker, groups: False  # type: ignore[method-assign]
    run.submit(BOB, 0)
    monkeypatch.setattr(trust, "UNCHECKED_SHARE", 0.0)
    with pytest.raises(BrokenError, match="has 1 groups that were not prefilled whole"):
        audit(run.folder, lambda line: None, Random(0), rerun=0, proofs=0, unsealed=True)


def test_a_file_that_says_it_was_not_prefilled_whole_is_named(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.publish(0)
    run.submit(ALICE, 0, prefilled=False)
    with pytest.raises(BrokenError, match="was prefilled whole, says the ledger; its file says otherwise"):
        audit(run.folder, lambda line: None, Random(0), rerun=0, proofs=0, unsealed=True)


@pytest.mark.parametrize("first", [0])
def test_tampering_is_found_and_named(finished: Path, tmp_path: Path, first: int) -> None:
    """A sixth of them; the next test has all."""
    assert missed(finished, tmp_path, every=6, first=first) == []


@pytest.mark.slow
def test_every_tampering_is_found_and_named(finished: Path, tmp_path: Path) -> None:
    assert missed(finished, tmp_path, every=1, first=0) == []
