"""Whole evaluations with a fake lm_eval can be resumed, compare two models, and refuse changed settings."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import ShoalError, UserError
from shoal.evals import harness
from shoal.evals.evaluate import CONFIG, Contestant, Difference, Score, evaluate, sentence
from shoal.evals.harness import Endpoint, check_installed
from shoal.evals.suites import TABLE, Suite, find, read_tasks
from shoal.tasks import Grade
from shoal.watch.estimates import Estimate

from .support import install_lm_eval, lines, quiet

SUMS = Suite("Sums", "for tests", "sums", max_tokens=8, filter="flexible")


@pytest.fixture(autouse=True)
def fake_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_lm_eval(tmp_path / "installed", monkeypatch)


def contestant(model: str, digest: str = "d") -> Contestant:
    @contextmanager
    def serve() -> Iterator[Endpoint]:
        yield Endpoint("http://127.0.0.1:1/v1", model)

    return Contestant(model, {"digest": digest}, serve)


def run(folder: Path, *models: str, suite: Suite = SUMS, n: int = 0) -> list[Score]:
    return evaluate([contestant(model) for model in models], [suite], folder, quiet(), n=n)[0]


def calls(folder: Path) -> list[dict[str, object]]:
    return lines(folder / "calls.jsonl")


def test_a_score_is_the_mean_of_the_suites_metric(tmp_path: Path) -> None:
    [result] = run(tmp_path / "out", "right-4")
    assert (result.avg.mean, result.k, len(result.values)) == (0.4, 1, 10)
    assert [value for _, value in sorted(result.values.items())] == [1.0] * 4 + [0.0] * 6
    [call] = calls(tmp_path / "out")
    assert call["base_url"] == "http://127.0.0.1:1/v1/chat/completions"
    assert (call["temperature"], call["do_sample"], call["max_gen_toks"], call["limit"]) == ("0.0", "False", "8", None)


def test_an_answer_may_contain_any_line_separator(tmp_path: Path) -> None:
    answer = "one\u2028two\u2029three\x85four"
    sample = {"doc_id": 0, "resps": [[answer]], "filter": "flexible"}
    text = json.dumps(sample, ensure_ascii=False) + "\n"  # as lm_eval writes it
    (tmp_path / "samples_sums_2026.jsonl").write_text(text, "utf-8")
    [read] = harness.run(Endpoint("http://127.0.0.1:1/v1", "m"), SUMS, tmp_path, seed=0, n=0)
    assert read["resps"] == [[answer]]


def test_two_models_are_compared_over_the_same_tasks(tmp_path: Path) -> None:
    models = [contestant("right-2"), contestant("right-9")]
    results, [difference] = evaluate(models, [SUMS], tmp_path / "out", quiet())
    assert [result.model for result in results] == ["right-2", "right-9"]
    assert (difference.before, difference.after, round(difference.avg.mean, 6)) == ("right-2", "right-9", 0.7)
    assert difference.avg.low > 0
    assert "+70.0 points" in sentence(difference) and "contains 0" not in sentence(difference)


def test_a_difference_with_0_in_its_interval_says_so() -> None:
    assert "the interval contains 0" in sentence(Difference("Sums", "a", "b", Estimate(0.01, -0.1, 0.1, "bootstrap")))


def test_a_finished_run_is_not_repeated_but_a_failed_run_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ShoalError, match="lm_eval failed for sums .*the server answered 503"):
        run(out, "right-4", "broken")
    assert [call["model"] for call in calls(out)] == ["right-4", "broken"]
    first = run(out, "right-4")
    assert run(out, "right-4") == first
    assert len(calls(out)) == 2, "a finished run was repeated"
    with pytest.raises(ShoalError, match="lm_eval failed"):
        run(out, "broken")
    assert len(calls(out)) == 3


def test_each_run_has_its_own_seed_and_the_score_is_the_mean_of_the_runs(tmp_path: Path) -> None:
    [result] = run(tmp_path / "out", "right-4", suite=replace(SUMS, k=2, temperature=0.6))
    assert (result.avg.mean, result.pass_at[2].mean) == (0.4, 0.4)
    assert [(call["seed"], call["temperature"]) for call in calls(tmp_path / "out")] == [("0", "0.6"), ("1", "0.6")]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel ends the children of a killed process")
def test_a_child_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from shoal.evals import harness\n"
        "with harness._child([sys.executable, '-c', 'import time; time.sleep(60)'], Path(sys.argv[1])) as child:\n"
        "    print(child.pid, flush=True); child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    assert child.is_dir()
    parent.kill()
    parent.communicate()
    deadline_s = time.monotonic() + 10
    while child.is_dir() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not child.is_dir() or "Z" in (child / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"suite": replace(SUMS, k=2, temperature=0.6)}, "k of Sums"),
        ({"n": 3}, "n of Sums"),
    ],
)
def test_the_error_for_changed_settings_names_the_changed_one(
    tmp_path: Path, changed: dict[str, object], named: str
) -> None:
    run(tmp_path / "out", "right-4")
    with pytest.raises(UserError, match=f"made with {named} = .*another --out"):
        run(tmp_path / "out", "right-4", **changed)  # type: ignore[arg-type]


def test_a_model_may_be_added_but_not_changed(tmp_path: Path) -> None:
    run(tmp_path / "out", "right-4")
    with pytest.raises(UserError, match="digest of right-4"):
        evaluate([contestant("right-4", "other")], [SUMS], tmp_path / "out", quiet())
    run(tmp_path / "out", "right-4", "right-5")
    assert set(json.loads((tmp_path / "out" / CONFIG).read_text())["models"]) == {"right-4", "right-5"}


def test_several_greedy_completions_of_a_task_are_refused_because_they_would_be_equal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--temperature"):
        run(tmp_path / "out", "right-4", suite=replace(SUMS, k=2))
    assert not (tmp_path / "out").exists()


def test_a_missing_lm_eval_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[evals\]'"):
        check_installed()


def test_a_name_that_is_not_a_suite_is_a_task_of_lm_eval() -> None:
    assert [suite.name for suite in find("gsm8k, MATH-500")] == ["GSM8K", "MATH-500"]
    [other] = find("drop")
    assert (other.task, other.k, other.temperature) == ("drop", 1, 0)
    with pytest.raises(ShoalError, match="each suite once"):
        find("GSM8K,gsm8k")


# --- code suites ---------------------------------------------------------------------------------------------------

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def double(x):\n",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(2) == 4"],
    "test_setup_code": "",
    "challenge_test_list": [],
}


def code_suite(name: str, folder: Path, *rows: dict[str, object]) -> Suite:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(find(name)[0], path=str(path))


@pytest.mark.parametrize(("name", "row"), [("HumanEval", HUMANEVAL), ("MBPP", MBPP)])
def test_our_sandbox_runs_the_programs_of_a_code_suite(name: str, row: dict[str, object], tmp_path: Path) -> None:
    suite = code_suite(name, tmp_path, row)
    right, wrong = (f"say-def double(x): return {body}" for body in ("x + x", "x"))
    models = [contestant(right), contestant(wrong)]
    results, _ = evaluate(models, [suite], tmp_path / "out", quiet())
    assert [(result.avg.mean, len(result.values)) for result in results] == [(1, 1), (0, 1)]
    [message] = lines(tmp_path / "out" / right / "tasks" / f"{suite.task}.jsonl")
    assert "{question}" not in str(message)


def test_a_program_that_cannot_be_graded_ends_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the program counted as wrong instead, the model would look worse than it is."""
    failed = Grade(0.0, "grader_error", "no sandbox here")
    monkeypatch.setattr("shoal.evals.evaluate.grade", lambda suite, tasks, completions: [failed for _ in tasks])
    with pytest.raises(ShoalError, match="1 programs of MBPP cannot be graded; the first is for .*: no sandbox here"):
        run(tmp_path / "out", "say-pass", suite=code_suite("MBPP", tmp_path, MBPP))


def test_the_first_n_tasks_of_a_code_suite_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = [MBPP | {"text": f"Double it ({number})."} for number in range(20)]
    first_5 = read_tasks(code_suite("MBPP", tmp_path, *rows), 5)
    assert read_tasks(code_suite("MBPP", tmp_path, *rows[::-1], rows[0]), 0)[:5] == first_5
    with pytest.raises(UserError, match="20 tasks, fewer than --n 21"):
        read_tasks(code_suite("MBPP", tmp_path, *rows), 21)


def test_the_sandbox_grades_every_code_suite() -> None:
    assert {suite.name for suite in TABLE if suite.prompt} == {"HumanEval", "MBPP", "LiveCodeBench"}
