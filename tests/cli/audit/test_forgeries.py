"""An audit finds each lie that a coordinator signs with its own key, and passes an honest ledger that is signed again."""

import math
import re
from pathlib import Path

import pytest

from shoal.cli.audit.run import BrokenError

from .forgeries import FORGERIES, dismissal, file, forging, reject
from .recorded import BOB, check, copy_of


def test_a_ledger_that_is_signed_again_unchanged_passes(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    with forging(folder):
        pass
    check(folder)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_lie_signed_with_the_coordinators_key_is_found(finished: Path, tmp_path: Path, name: str) -> None:
    forge, message = FORGERIES[name]
    folder = copy_of(finished, tmp_path / "run")
    with forging(folder) as ledger:
        forge(ledger)
    with pytest.raises(BrokenError) as broken:
        check(folder)
    assert re.search(message, str(broken.value)), str(broken.value)
    assert re.match(r"ledger entry \d+$|table nodes: \w+$", broken.value.link)


@pytest.mark.parametrize(
    ("evidence", "submissions", "named"),
    [
        (0.5, 1, "the opinions give"),
        (math.nan, 1, "says nan|must be JSON"),
        (99.0, 0, "for 0 submissions"),
        (99.0, 50, "for 50 submissions, but not all of them were judged before"),
        (99.0, 2, "the opinions give .* the entry says 99"),
    ],
)
def test_a_dismissal_needs_evidence_that_follows_from_the_verdicts(
    finished: Path, tmp_path: Path, evidence: float, submissions: int, named: str
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    with pytest.raises((BrokenError, ValueError), match=named):
        with forging(folder) as ledger:
            dismissal(ledger, evidence, submissions)
        check(folder)


@pytest.mark.parametrize("reason", ["unreadable", "signature", "context"])
def test_a_rejection_that_its_file_does_not_explain_is_counted(finished: Path, tmp_path: Path, reason: str) -> None:
    """Such a rejection is not a broken link, because the validator may have run out of time or memory."""
    folder = copy_of(finished, tmp_path / "run")
    with forging(folder) as ledger:
        reject(ledger, file(ledger, BOB, 5), reason)
    assert f"not compared: 1 rejections as {reason} of files that are whole and signed for their task" in check(folder)


def test_hard_rejections_that_were_not_judged_again_are_counted(finished: Path) -> None:
    lines = check(finished)
    assert "hard rejections: 0 of 1 judged again" in lines
    assert "not compared: 1 hard rejections: not requested (--proofs 0)" in lines


def test_a_table_that_no_parser_can_read_is_a_broken_link(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    with forging(folder) as ledger:
        ledger.database.execute("UPDATE history SET body = ? WHERE kind = 'step'", ["[" * 100_000])
    with pytest.raises(BrokenError) as broken:
        check(folder)
    assert broken.value.link == "files"
