"""IFEval's grader through lm-eval, and what happens without it."""

import builtins
import json
from typing import Any

import pytest

from shoal.tasks.rewards import instructions
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
    pytest.importorskip("lm_eval", reason="needs the extra `evals`")
    return Instructions().grade([one], [completion])[0]


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
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("lm_eval", "langdetect"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match=r"shoal\[evals\]"):
        Instructions().grade([task(TITLE)], ["x"])


def test_data_that_the_library_lacks_are_named() -> None:
    def check(row: dict[str, Any], completions: list[str]) -> dict[str, Any]:
        raise LookupError("Resource 'punkt_tab' not found")

    found = instructions._grade(check, task(TITLE), "x")
    assert found.outcome == "grader_error"
    assert "nltk.downloader punkt_tab" in found.detail
