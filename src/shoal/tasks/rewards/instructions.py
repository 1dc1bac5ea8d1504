"""The reward `instructions`: 1 if a completion follows all instructions of an IFEval task, else 0 (Zhou et al. 2023).

The grader is that of EleutherAI's lm-evaluation-harness, Google's code with its faults mended, so that scores compare with
published ones. The score is its prompt-level strict accuracy; `parts` also holds the loose one.
Invariant: language detection is seeded, so a grade follows from task and completion alone.
Needs the extra `evals`, imported with the first grade. One instruction (number of sentences) needs NLTK's data `punkt_tab`,
which the library asks for over the network at its import. Left out: a limit on time; the checks are linear in the text.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from shoal.errors import ShoalError
from shoal.tasks.task import Grade, Task

Check = Callable[[dict[str, Any], list[str]], dict[str, Any]]


class MissingExtraError(ShoalError):
    """A package that is not installed; the message names the extra that brings it."""


class Instructions:
    def __init__(self) -> None:
        self.check: Check | None = None

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Raises MissingExtraError."""
        check = self.check = self.check or _load()
        return [_grade(check, task, completion) for task, completion in zip(tasks, completions, strict=True)]

    def close(self) -> None:
        pass


def _load() -> Check:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints about what it downloads
            import langdetect
            from lm_eval.tasks.ifeval.utils import process_results
    except ImportError as error:
        raise MissingExtraError(
            f"IFEval is graded by lm-eval, which is not installed ({error.name}): pip install 'shoal[evals]'"
        ) from error
    langdetect.DetectorFactory.seed = 0
    check: Check = process_results
    return check


def _grade(check: Check, task: Task, completion: str) -> Grade:
    try:
        found = json.loads(task.metadata)
        row = {
            "key": found.get("key", 0),
            "instruction_id_list": found["instruction_id_list"],
            "prompt": task.question,
            "kwargs": found["kwargs"],
        }
        followed = check(row, [completion])
    except LookupError as error:  # KeyError too: an instruction that the library does not know
        needs_data = "punkt_tab" in str(error)
        why = "NLTK's data are missing: python -m nltk.downloader punkt_tab" if needs_data else repr(error)
        return Grade(0.0, "grader_error", why)
    except Exception as error:  # noqa: BLE001 - a grader that fails is a grade, whatever it raises
        return Grade(0.0, "grader_error", f"{type(error).__name__}: {error}")
    each = zip(found["instruction_id_list"], followed["inst_level_strict_acc"], strict=True)
    broken = [name for name, kept in each if not kept]
    strict, loose = float(followed["prompt_level_strict_acc"]), float(followed["prompt_level_loose_acc"])
    detail = f"not followed: {', '.join(broken)}" if broken else "all followed"
    return Grade(strict, detail=detail, parts={"strict": strict, "loose": loose})
