"""IFEval's grader through lm-eval, and what happens without it. Where it is not installed, a stand-in shows the limits."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks.rewards.instructions import Instructions, MissingExtraError
from shoal.tasks.task import Grade, Task


def task(*followed: tuple[str, dict[str, Any]]) -> Task:
    names, options = zip(*followed, strict=True)
    metadata = json.dumps({"key": 1, "instruction_id_list": names, "kwargs": options})
    return Task(id="t", question="Write.", answer="", metadata=metadata)


NO_COMMA = ("punctuation:no_comma", {})
TITLE = ("detectable_format:title", {})
KEYWORD = ("keywords:existence", {"keywords": ["shoal"]})


def grade(one: Task, completion: str) -> Grade:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'shoal[evals]'")
    return graded([one], [completion])[0]


def graded(tasks: list[Task], completions: list[str], *, cpu_s: float = 10.0) -> list[Grade]:
    reward = Instructions(cpu_s=cpu_s)
    try:
        return reward.grade(tasks, completions)
    finally:
        reward.close()


STAND_IN = """
def process_results(row, completions):
    (text,) = completions
    if text == "slow":
        while True:
            pass
    if text == "no data":
        raise LookupError("Resource 'punkt_tab' not found")
    kept = [text != "bad" for _ in row["instruction_id_list"]]
    return {"inst_level_strict_acc": kept, "prompt_level_strict_acc": all(kept), "prompt_level_loose_acc": True}
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the names that the reward imports, instead of the libraries."""
    folder = tmp_path / "lm_eval" / "tasks" / "ifeval"
    folder.mkdir(parents=True)
    for package in (folder, *list(folder.parents)[:2]):
        (package / "__init__.py").write_text("")
    (folder / "utils.py").write_text(STAND_IN)
    (tmp_path / "langdetect.py").write_text("class DetectorFactory: seed = None\ndef detect(text): return 'en'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


def test_all_instructions_must_be_followed() -> None:
    assert grade(task(NO_COMMA, KEYWORD), "The shoal turns.").score == 1
    found = grade(task(NO_COMMA, KEYWORD), "A shoal, turning.")
    assert (found.score, found.detail) == (0, "not followed: punctuation:no_comma")


def test_the_loose_score_stands_beside_the_strict_one() -> None:
    found = grade(task(NO_COMMA), "Sure, here it is:\nThe shoal turns.")
    assert found.parts == {"strict": 0.0, "loose": 1.0}
    assert found.score == 0


def test_an_unknown_instruction_and_missing_metadata_are_grader_errors() -> None:
    assert grade(task(("poetry:sonnet", {})), "x").outcome == "grader_error"
    found = grade(Task(id="t", question="q", answer=""), "x")
    assert (found.outcome, found.score) == ("grader_error", 0)


def test_the_detected_language_does_not_change_from_call_to_call() -> None:
    one = task(("language:response_language", {"language": "de"}))
    assert {grade(one, "Das ist ein shoal, also eine Schule.").score for _ in range(5)} == {1.0}


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"shoal\[evals\]"):
        graded([task(TITLE)], ["x"])


@pytest.mark.usefixtures("stand_in")
def test_a_check_without_end_is_a_grader_error_and_the_others_keep_their_grades() -> None:
    good, slow, bad = graded([task(TITLE)] * 3, ["good", "slow", "bad"], cpu_s=1.0)
    assert (good.score, bad.score, bad.parts) == (1.0, 0.0, {"strict": 0.0, "loose": 1.0})
    assert bad.detail == "not followed: detectable_format:title"
    assert (slow.outcome, slow.repeatable, slow.detail) == (
        "grader_error",
        False,
        "the limit of 1 s of CPU time passed",
    )


@pytest.mark.usefixtures("stand_in")
def test_data_that_the_library_lacks_are_named() -> None:
    (found,) = graded([task(TITLE)], ["no data"])
    assert found.outcome == "grader_error"
    assert "nltk.downloader punkt_tab" in found.detail


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("metadata", ["", "[" * 65_536])
def test_metadata_that_cannot_be_read_are_a_grader_error(metadata: str) -> None:
    (found,) = graded([Task(id="t", question="q", answer="", metadata=metadata)], ["x"])
    assert (found.outcome, found.score) == ("grader_error", 0)
