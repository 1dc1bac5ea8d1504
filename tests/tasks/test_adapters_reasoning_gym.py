"""reasoning-gym as a source: every data set, answers that score 1, and answers that would run as code."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks import Graders, inside, libraries, load
from shoal.tasks.task import GradeError, Task, TasksNotFoundError

from .test_adapters import graded

if importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed: pip install 'shoal[reasoning-gym]'", allow_module_level=True)

SWEEP = Path(__file__).with_name("sweep_reasoning_gym.py")
EVALUATED = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
}
# Many answers are right, so an entry has no gold answer.
NO_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
ANY_TEXT = {"game_of_life_halting"}  # takes every text for "False"
UNSEEDED = {"codeio"}  # its programs use unseeded random numbers


@pytest.fixture(scope="module")
def swept() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-P", str(SWEEP), str(Path(inside.__file__).with_name("gym.py"))],
        env=os.environ | {"PYTHONHASHSEED": "0", "TZ": "UTC"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def rows(**options: Any) -> list[Task]:
    listed = libraries.rows("reasoning_gym", options)
    return [Task(id=f"gym/{n}", source="gym", **row) for n, row in enumerate(listed)]


def test_gold_answers_of_all_data_sets_score_1(swept: dict[str, dict[str, Any]]) -> None:
    assert len(swept) >= 100
    full = [[1.0, "graded"]] * 3
    assert {name for name, line in swept.items() if line["gold"] != full} == NO_GOLD
    assert {name for name, line in swept.items() if line["tagged"] != full} == NO_GOLD


def test_a_wrong_answer_scores_below_one_half_in_all_data_sets_but_one(swept: dict[str, dict[str, Any]]) -> None:
    assert {name for name, line in swept.items() if any(score >= 0.5 for score, _ in line["wrong"])} == ANY_TEXT
    assert {outcome for line in swept.values() for _, outcome in line["wrong"]} == {"graded", "wrong_format"}


def test_every_data_set_whose_scorer_pays_for_a_constant_answer_is_refused(swept: dict[str, dict[str, Any]]) -> None:
    text = Path(inside.__file__).with_name("gym.py").read_text()
    refused = set(re.findall(r'"(\w+)"', text.partition("REFUSED = {")[2].partition("}")[0]))
    assert {name for name, line in swept.items() if line["constants"]} | ANY_TEXT == refused
    for name in refused:
        with pytest.raises(TasksNotFoundError, match=f"data set {name} is refused"):
            libraries.rows("reasoning_gym", {"dataset": name})
        with pytest.raises(TasksNotFoundError, match=f"data set {name} is refused"):
            libraries.rows("reasoning_gym", {"dataset": "composite", "datasets": [{"name": name}]})


def test_an_entry_is_the_same_when_it_is_generated_again(swept: dict[str, dict[str, Any]]) -> None:
    assert {name for name, line in swept.items() if not line["same"]} <= UNSEEDED


def test_every_data_set_that_evaluates_answers_is_guarded(swept: dict[str, dict[str, Any]]) -> None:
    assert {name for name, line in swept.items() if line["evaluated"]} - {"composite"} == EVALUATED


@pytest.mark.parametrize("name", sorted(EVALUATED - {"puzzle24"}))
def test_no_answer_runs_as_code(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = f"__import__('pathlib').Path({str(mark)!r}).mkdir()"
    answers = [run, f"[{run}]", f"sin({run!r})", f"[x for x in [{run}]]", f"{run}!", f"(lambda: {run})()"]
    answers += [f"f'{{{run}}}'"]
    (task,) = rows(dataset=name, size=1)
    grades = graded("reasoning_gym", [task] * len(answers), answers)
    assert not mark.exists()
    assert all(grade.score < 0.5 and grade.outcome == "graded" for grade in grades), grades


def test_no_option_runs_as_code(tmp_path: Path) -> None:
    """Options come from the run's author, whom a worker need not trust; some data sets evaluate them."""
    mark = tmp_path / "mark"
    run = f"__import__('pathlib').Path({str(mark)!r}).mkdir()"
    for options in (
        {"dataset": "simple_equations", "operators": [run]},
        {"dataset": "composite", "datasets": [{run: 1}]},
    ):
        with pytest.raises(TasksNotFoundError, match="evaluate them or open them"):
            libraries.rows("reasoning_gym", options)
    (task,) = rows(dataset="simple_equations", size=1)
    hostile = json.loads(task.metadata)
    hostile["setting"]["operators"] = [run]
    with pytest.raises(GradeError, match="evaluate them or open them"):
        graded("reasoning_gym", [replace(task, metadata=json.dumps(hostile))], [task.answer])
    assert not mark.exists()


def test_a_task_of_another_question_or_version_is_a_grader_error() -> None:
    (task,) = rows(dataset="chain_sum", size=1)
    old = replace(task, metadata=json.dumps(json.loads(task.metadata) | {"version": "0.1.0"}))
    grades = graded("reasoning_gym", [replace(task, question="1 + 1 ="), old], [task.answer] * 2)
    assert [grade.outcome for grade in grades] == ["grader_error"] * 2
    assert "another question" in grades[0].detail and "0.1.0" in grades[1].detail


def test_an_answer_cannot_refer_to_the_graders_variables() -> None:
    (task,) = rows(dataset="string_insertion", size=1)
    grades = graded("reasoning_gym", [task] * 2, ["oracle_answer", str(list(task.answer))])
    assert [grade.score for grade in grades] == [0.0, 0.1]  # 0.1 is the library's score of the answer as a list


def test_an_endless_computation_is_a_grader_error() -> None:
    (task,) = rows(dataset="countdown", size=1)
    grades = graded("reasoning_gym", [task] * 2, ["9**9**9**9", task.answer])
    assert [(grade.score, grade.outcome) for grade in grades] == [(0.0, "grader_error"), (1.0, "graded")]


def test_a_right_answer_with_one_more_character_scores_at_most_1() -> None:
    """spell_backward adds a fraction for each right letter, and the sum of nine ninths exceeds 1."""
    nine = [task for task in rows(dataset="spell_backward", size=100) if len(task.answer) == 9]
    grades = graded("reasoning_gym", nine, [f"<answer>{task.answer}.</answer>" for task in nine])
    assert {(grade.score, grade.outcome) for grade in grades} == {(1.0, "graded")}


def test_rows_depend_on_the_options_and_not_on_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = rows(dataset="word_ladder", size=3, seed=5)  # the library iterates over sets of strings
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert rows(dataset="word_ladder", size=3, seed=5) == first
    assert rows(dataset="word_ladder", size=3, seed=6) != first


def test_a_question_that_is_generated_twice_is_listed_once() -> None:
    questions = [task.question for task in rows(dataset="count_bits", size=50, min_n=1, max_n=20)]
    assert 0 < len(questions) < 50 and len(set(questions)) == len(questions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "options.dataset is None; reasoning-gym .* has ab, acre"),
        ({"dataset": "chain_sums"}, "'chain_sums'"),
        ({"dataset": "chain_sum", "terms": 2}, "refuses the options: .*'terms'"),
        ({"dataset": "chain_sum", "min_terms": 5, "max_terms": 2}, "refuses the options"),
        ({"dataset": "spell_backward", "data_file": "../../secret.txt"}, "evaluate them or open them"),
        ({"dataset": "composite", "datasets": [{"name": "no_such"}]}, "refuses the options"),
        (
            {"dataset": "composite", "datasets": [{"config": {"data_file": "../secret.txt"}}]},
            "evaluate them or open them",
        ),
    ],
)
def test_the_error_names_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TasksNotFoundError, match=message):
        libraries.rows("reasoning_gym", options)


def test_a_config_with_a_reasoning_gym_source_has_its_tasks_and_its_reward() -> None:
    options = {"dataset": "chain_sum", "size": 60, "max_terms": 2, "max_digits": 2}
    section = TaskSection(sources=[SourceSection(generator="reasoning_gym", options=options)], heldout=8)
    tasks = load(section)
    other = SourceSection(generator="reasoning_gym", options=options | {"seed": 7})
    assert load(TaskSection(sources=[other], heldout=8)).digest != tasks.digest
    with Graders(section) as graders:
        grades = graders.grade(tasks.heldout, [task.answer for task in tasks.heldout])
        (empty,) = graders.grade(tasks.heldout[:1], ["<answer></answer>"])
    assert [grade.score for grade in grades] == [1.0] * 8
    assert (empty.score, empty.outcome) == (0.0, "wrong_format")
