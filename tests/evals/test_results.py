"""Grades become results, and results become JSON, a table and a picture."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from shoal.evals.completions import Answer
from shoal.evals.report import draw, sentence, table, write_results
from shoal.evals.results import Result, compare, ks, summarise
from shoal.tasks.task import Grade
from tests.evals.support import quiet, written


def graded(
    score: float, outcome: str = "graded", *, ended: bool = True, tokens: int | None = 10
) -> tuple[Answer, Grade]:
    return Answer("x", tokens, ended), Grade(score, outcome)  # type: ignore[arg-type]


def result(model: str = "m", right: int = 1, tasks: int = 4, suite: str = "Sums") -> Result:
    return summarise(model, suite, [[graded(float(n < right)), graded(0.0)] for n in range(tasks)])


def test_wrong_formats_and_grader_errors_are_counted_apart_and_as_zero() -> None:
    found = summarise(
        "m", "s", [[graded(1), graded(0, "wrong_format")], [graded(0, "grader_error"), graded(0, ended=False)]]
    )
    assert found.avg.mean == 0.25
    assert (found.wrong_format, found.grader_error, found.cut_off) == (0.25, 0.25, 0.25)
    assert found.pass_at[2].mean == 0.5
    assert found.tokens_mean == 10


def test_only_a_full_score_counts_as_passed() -> None:
    found = summarise("m", "s", [[graded(0.5)], [graded(1.0)]])
    assert found.avg.mean == 0.75
    assert found.pass_at[1].mean == 0.5


def test_tokens_that_a_server_does_not_tell_are_not_averaged() -> None:
    assert summarise("m", "s", [[graded(1, tokens=None)], [graded(1)]]).tokens_mean is None


def test_parts_and_scores_at_a_limit_are_reported() -> None:
    followed = Grade(1.0, parts={"strict": 1.0, "loose": 1.0})
    broken = Grade(0.0, parts={"strict": 0.0, "loose": 1.0}, repeatable=False)
    found = summarise("m", "s", [[(Answer("x", 1, ended=True), grade)] for grade in (followed, broken)])
    assert found.parts == {"loose": 1.0, "strict": 0.5}
    assert found.unrepeatable == 0.5


def test_pass_is_estimated_at_powers_of_two_and_k() -> None:
    assert ks(12) == [1, 2, 4, 8, 12]


def test_models_are_compared_with_the_first_on_each_suite() -> None:
    found = compare([result("a", 1), result("b", 3), result("a", 2, suite="T"), result("b", 2, suite="T")])
    assert [(d.suite, d.before, d.after) for d in found] == [("Sums", "a", "b"), ("T", "a", "b")]
    assert found[0].avg.mean == pytest.approx(0.25)
    assert "+25.0 points" in sentence(found[0])
    assert "the interval holds 0" in sentence(found[1])


def test_json_holds_every_figure_and_what_was_run(tmp_path: Path) -> None:
    write_results(tmp_path / "r.json", [result()], [], {"command": "shoal eval"})
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["command"] == "shoal eval"
    [one] = found["results"]
    assert one["avg"]["mean"] == 0.125
    assert set(one["avg"]) == {"mean", "low", "high", "method"}
    assert set(one["pass_at"]) == {"1", "2"}
    assert "values" not in one


def test_the_table_fits_eighty_columns_and_shows_models_side_by_side() -> None:
    results = [result("before", 1, 200), result("after", 90, 200)]
    console = Console(file=quiet().file, width=80)
    console.print(table(results, compare(results)))
    text = written(console)
    row = next(line for line in text.splitlines() if line.startswith("avg@2"))
    assert "0.2 % [" in row
    assert "22.5 % [" in row
    assert "…" not in text
    assert "points [" in text


def test_a_grader_error_is_said_in_words() -> None:
    console = quiet()
    console.print(table([summarise("m", "Sums", [[graded(0, "grader_error")]])], []))
    assert "the score of Sums is too low" in written(console)


def test_a_model_may_be_called_anything(tmp_path: Path) -> None:
    results = [result("$\\frac{a}\x1b[31m[bold]", 2), result("plain", 4)]
    console = quiet()
    console.print(table(results, compare(results)))
    assert "\x1b[31m" not in written(console)
    assert "[bold]" in written(console)
    draw(results, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
