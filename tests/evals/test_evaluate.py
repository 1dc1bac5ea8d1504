"""A whole evaluation with a fake sampler: results, kill and resume, settings that differ."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.evals.completions import EvalError
from shoal.evals.evaluate import COMPLETIONS, CONFIG, GRADES, evaluate
from shoal.evals.results import Result
from shoal.tasks.rewards import graders
from tests.evals.support import FakeSampler, Killed, contestant, entry, lines, quiet
from tests.rewards import Always


def run(folder: Path, sampler: FakeSampler, *, seed: int = 0, n: int = 8, k: int = 2) -> list[Result]:
    results, _ = evaluate([contestant(sampler)], [entry(n, k)], folder, quiet(), seed=seed)
    return results


def test_a_result_is_what_its_grades_say(tmp_path: Path) -> None:
    [result] = run(tmp_path, FakeSampler(), n=8, k=4)
    grades = lines(tmp_path / GRADES)
    assert len(grades) == 32
    scores = [grade["score"] for grade in grades]
    assert result.avg.mean == pytest.approx(sum(map(float, map(str, scores))) / 32)
    assert 0 < result.avg.mean < 1  # else this shows little
    assert result.wrong_format == sum(grade["outcome"] == "wrong_format" for grade in grades) / 32
    assert result.grader_error == 0
    assert sorted(result.pass_at) == [1, 2, 4]
    any_right = [max(float(str(g["score"])) for g in grades[4 * t : 4 * t + 4]) for t in range(8)]
    assert result.pass_at[4].mean == pytest.approx(sum(any_right) / 8)


@pytest.mark.parametrize("dies_at", [0, 1, 3])
def test_a_killed_evaluation_goes_on_and_ends_as_an_uninterrupted_one(tmp_path: Path, dies_at: int) -> None:
    whole = run(tmp_path / "whole", FakeSampler())
    with pytest.raises(Killed):
        run(tmp_path / "killed", FakeSampler(dies_at=dies_at))
    second = FakeSampler()
    assert run(tmp_path / "killed", second) == whole
    assert len(second.asked) == 16 - 3 * dies_at  # nothing was made twice
    for name in (COMPLETIONS, GRADES):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_half_written_completion_is_made_again(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", FakeSampler())
    file = tmp_path / "whole" / COMPLETIONS
    file.write_bytes(file.read_bytes()[:-20])
    second = FakeSampler()
    assert run(tmp_path / "whole", second) == whole
    assert len(second.asked) == 1
    assert len(lines(file)) == 16


def test_a_damaged_completion_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    run(tmp_path, FakeSampler())
    file = tmp_path / COMPLETIONS
    kept = file.read_text().splitlines()
    file.write_text("\n".join([kept[0], "{}", *kept[2:]]) + "\n")
    with pytest.raises(EvalError, match="line 2, is not a completion"):
        run(tmp_path, FakeSampler())


def test_a_finished_evaluation_loads_no_model(tmp_path: Path) -> None:
    first = run(tmp_path, FakeSampler())
    again = FakeSampler(dies_at=0)
    assert run(tmp_path, again) == first


@pytest.mark.parametrize(
    ("changed", "named"), [({"seed": 1}, "seed"), ({"k": 4}, "k of Sums"), ({"n": 9}, "tasks of Sums")]
)
def test_other_settings_are_refused_and_named(tmp_path: Path, changed: dict[str, int], named: str) -> None:
    run(tmp_path, FakeSampler())
    with pytest.raises(EvalError, match=f"made with {named} = .*another --out"):
        run(tmp_path, FakeSampler(), **changed)


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    run(tmp_path, FakeSampler())
    with pytest.raises(EvalError, match="digest of m"):
        evaluate([contestant(FakeSampler(), digest="other")], [entry(8)], tmp_path, quiet())


def test_a_model_can_be_added_and_is_compared_over_the_same_tasks(tmp_path: Path) -> None:
    run(tmp_path, FakeSampler(), n=20)
    models = [contestant(FakeSampler(dies_at=0)), contestant(FakeSampler(right=0.9), "better")]
    results, [difference] = evaluate(models, [entry(20)], tmp_path, quiet())
    assert [result.model for result in results] == ["m", "better"]
    assert (difference.before, difference.after) == ("m", "better")
    assert difference.avg.mean == pytest.approx(results[1].avg.mean - results[0].avg.mean)
    assert difference.avg.low > 0
    assert set(json.loads((tmp_path / CONFIG).read_text())["models"]) == {"m", "better"}


def test_equal_greedy_completions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="--temperature"):
        evaluate([contestant(FakeSampler())], [entry(4, 2, temperature=0.0)], tmp_path, quiet())
    assert not list(tmp_path.iterdir())


def test_two_evaluations_do_not_share_a_folder_at_once(tmp_path: Path) -> None:
    class Second(FakeSampler):
        def answer(self, *arguments: object) -> None:  # type: ignore[override]
            run(tmp_path, FakeSampler())

    with pytest.raises(EvalError, match="another process"):
        run(tmp_path, Second())


def test_a_failing_grader_is_reported_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graders.REWARDS, "number", lambda _: Always(0.0, "grader_error", "out of order"))
    [result] = run(tmp_path, FakeSampler())
    assert result.grader_error == 1
    assert result.wrong_format == 0


def test_kill_9_loses_only_what_was_not_yet_answered(tmp_path: Path) -> None:
    """A process of its own, killed for real."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.evals.support import FakeSampler, Killed\n"
        "from tests.evals.test_evaluate import run\n"
        "try: run(Path(sys.argv[1]), FakeSampler(dies_at=2))\n"
        "except Killed: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parent.parent.parent
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "killed")], cwd=root, check=False)
    assert ended.returncode == -signal.SIGKILL
    second = FakeSampler()
    assert run(tmp_path / "killed", second) == run(tmp_path / "whole", FakeSampler())
    assert len(second.asked) == 16 - 6
