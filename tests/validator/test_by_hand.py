"""`shoal audit` gives an exit status for scripts, and a line on each check for people."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.trust.adversary.cheats import QuantizedWeights

from shoal import config as config_module
from shoal.cli.main import DONE, USAGE, main
from shoal.coordinator.submissions import SCHEMA, Submission, Submissions
from shoal.ledger.connection import open_sqlite
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity
from shoal.store.rollouts import Rollout
from shoal.validator.by_hand import ACCEPTED, EQUAL, REJECTED, UNEQUAL, UNREADABLE, find_weights
from shoal.validator.checks import ALL, EXACT, FILE
from shoal.worker.produce import Producer

from ..workers import ALICE, RUN, produced, signed
from .support import ASSIGNMENT, config, make_producer

pytestmark = pytest.mark.usefixtures("one_thread")


NOT_ASKED = "accepted; not asked: context, derived_tasks"
NOT_RUN = "rejected; the checks after this one did not run"


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of a run that `shoal audit` reads. Return their folder."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.toml").write_text(config_module.dumps(config(model={"dtype": "float32"})))
    shutil.copytree(tiny_folder, folder / "learner" / "versions" / "v000002")
    return folder


@pytest.fixture
def verify(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Return a function that audits bytes and returns the exit status and the printed lines."""

    def verify(data: bytes) -> tuple[int, list[str]]:
        (tmp_path / "file.parquet").write_bytes(data)
        status = main(["audit", str(tmp_path / "file.parquet"), "--run", str(run)])
        return status, capsys.readouterr().out.splitlines()

    return verify


def answers(lines: list[str]) -> dict[str, str]:
    return {line.split()[1]: line.split()[0] for line in lines if line[:3] in ("yes", "NO ", "-- ")}


def test_honest_work_is_accepted_with_a_line_for_each_check(verify, worker: Producer) -> None:  # type: ignore[no-untyped-def]
    status, lines = verify(worker.submission(ASSIGNMENT))
    assert (status, lines[-1]) == (ACCEPTED, NOT_ASKED)
    results = answers(lines)
    unasked = NOT_ASKED.partition(": ")[2].split(", ")
    expected = {check.__name__: "--" if check.__name__ in unasked else "yes" for check in ALL}
    assert {check.__name__: results.pop(check.__name__) for check in ALL} == expected
    # The file is also compared bit for bit, but a difference does not lead to a rejection.
    same = set(results) == {check.__name__ for check in EXACT}
    assert lines[-2] == (EQUAL if same else UNEQUAL)
    for check in [*ALL, *EXACT]:
        assert any((check.__doc__ or "?").splitlines()[0] in line for line in lines), "each question must be printed"
    assert any("margin_max" in line and "mismatch_frac" in line for line in lines), "the figures must be printed"


def test_a_lie_that_a_cheap_check_finds_is_named_without_a_prefill(
    verify, worker: Producer, honest: list[Rollout]
) -> None:  # type: ignore[no-untyped-def]
    lied = [replace(row, seed=row.seed + 1) for row in honest]
    status, lines = verify(signed(worker, ASSIGNMENT, lied))
    assert status == REJECTED and lines[-1] == NOT_RUN
    assert answers(lines) == {"context": "--", "derived_tasks": "NO"}


def test_a_lie_about_the_weights_is_rejected(verify, tiny_folder: Path) -> None:  # type: ignore[no-untyped-def]
    status, lines = verify(make_producer(tiny_folder, config(), QuantizedWeights).submission(ASSIGNMENT))
    assert (status, lines[-1]) == (REJECTED, NOT_RUN)
    assert answers(lines)["proof"] == "NO" and len(answers(lines)) == len(FILE) + 1


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, ACCEPTED),
        ({"nonce": "f" * 32}, REJECTED),
        ({"step": 4}, REJECTED),
        ({"digest": "f" * 64}, REJECTED),
        ({"groups": 3}, REJECTED),
        ({"worker": ALICE.public[:16] + "f" * 48}, REJECTED),
        ({"run": "another-0"}, REJECTED),
        ({"id": f"{ALICE.public[:16]}-000099"}, REJECTED),
    ],
    ids=str,
)
def test_a_file_is_compared_with_the_task_that_the_run_assigned(
    run: Path,
    worker: Producer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    status: int,
) -> None:
    """Without the run's records, the file itself names its task, so such a comparison would always give yes."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "coordinator").mkdir()
    given = {"version": ASSIGNMENT.policy_version, "digest": ASSIGNMENT.policy_digest, "worker": ALICE.public}
    given |= {"assigned_s": 0.0, "deadline_s": 0.0} | {
        name: getattr(ASSIGNMENT, name) for name in ("id", "number", "step", "groups", "nonce")
    }
    connection = open_sqlite(folder / "coordinator" / "pool.sqlite")
    for statement in SCHEMA:
        connection.change(statement)
    Ledger(connection, Identity.generate()).append("started", {"run": changed.get("run", RUN)})
    Submissions(connection).add(Submission(**given | {name: value for name, value in changed.items() if name != "run"}))
    connection.sqlite.close()
    (tmp_path / "file.parquet").write_bytes(worker.submission(ASSIGNMENT))
    assert main(["audit", str(tmp_path / "file.parquet"), "--run", str(folder)]) == status
    lines = capsys.readouterr().out.splitlines()
    if status == ACCEPTED:
        assert answers(lines)["context"] == answers(lines)["derived_tasks"] == "yes"
        assert lines[-1] == "accepted"
    else:
        assert answers(lines) == {"context": "NO"} or "assigned no submission" in lines[-1]


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_damaged_file_is_unreadable(verify, worker: Producer, cut: int) -> None:  # type: ignore[no-untyped-def]
    status, lines = verify(worker.submission(ASSIGNMENT)[:cut])
    assert status == UNREADABLE and len(lines) == 1 and lines[0].startswith("unreadable: ")


def test_a_file_with_an_implausibly_high_submission_number_is_checked_and_accepted(verify, worker: Producer) -> None:  # type: ignore[no-untyped-def]
    given = ASSIGNMENT.model_copy(update={"number": 10**6})
    status, lines = verify(signed(worker, given, produced(worker, given)))
    assert status == ACCEPTED, lines


def test_the_error_names_missing_weights_or_options(
    run: Path, tiny_folder: Path, worker: Producer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.parquet"
    file.write_bytes(worker.submission(ASSIGNMENT.model_copy(update={"policy_version": 7})))
    assert main(["audit", str(file), "--run", str(run)]) == USAGE, "missing weights must not count as a rejection"
    assert "no longer holds version 7" in capsys.readouterr().err
    other = ["--weights", str(tmp_path / "versions" / "v000008")]
    assert main(["audit", str(file), "--run", str(run), *other]) == USAGE, "other weights must not count as a rejection"
    assert "v000008 holds version 8, but the file was made with version 7" in capsys.readouterr().err
    assert main(["audit", str(file)]) == USAGE
    assert "--run DIR" in capsys.readouterr().err
    file.write_bytes(worker.submission(ASSIGNMENT))
    arguments = ["--run", str(run), "--weights", str(tiny_folder)]
    assert main(["audit", str(file), *arguments]) == DONE
    first, *_, last = capsys.readouterr().out.splitlines()
    assert last == NOT_ASKED and "is taken for version 2; with other weights the result means nothing" in first


def test_weights_are_found_in_the_folder_of_any_node_of_the_run(tmp_path: Path) -> None:
    kept = tmp_path / "worker-1" / "weights" / "v000003"
    kept.mkdir(parents=True)
    assert find_weights(tmp_path, 3) == kept
    with pytest.raises(FileNotFoundError, match="--weights"):
        find_weights(tmp_path, 4)
