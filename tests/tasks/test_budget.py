"""Length budgets: what a prompt asks for, and what a completion loses."""

from typing import Any

import pytest

from shoal.config import ConfigError, parse
from shoal.config.tasks import TaskSection
from shoal.tasks import Task
from shoal.tasks.budget import reward
from shoal.tasks.prompt import prompt_tokens

TASK = Task(id="2+3", question="2 + 3", answer="5", source="arithmetic")


class Listening:
    """A tokenizer that gives the user's message as character codes."""

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return {"input_ids": [ord(character) for character in messages[-1]["content"]]}


def said(section: TaskSection, target: int) -> str:
    return "".join(map(chr, prompt_tokens(Listening(), section, TASK, target)))


@pytest.mark.parametrize(
    ("mode", "score", "length", "target", "expected"),
    [
        ("target", 1.0, 500, 0, 1.0),
        ("target", 1.0, 500, 500, 1.0),
        ("target", 1.0, 300, 500, 0.94),
        ("target", 1.0, 700, 500, 0.94),
        ("target", 0.0, 0, 1000, -0.3),
        ("max", 1.0, 300, 500, 1.0),
        ("max", 1.0, 500, 500, 1.0),
        ("max", 1.0, 700, 500, 0.94),
        ("max", 1.0, 700, 0, 1.0),
        ("off", 1.0, 700, 500, 1.0),
    ],
)
def test_a_reward_is_the_score_less_the_penalty_of_the_mode(
    mode: Any, score: float, length: int, target: int, expected: float
) -> None:
    section = TaskSection(length_mode=mode, length_penalty=0.0003)
    assert reward(score, length, target, section) == pytest.approx(expected)


def test_the_prompt_states_the_target_in_the_papers_words() -> None:
    assert said(TaskSection(), 2000) == "2 + 3\nThink for 2000 tokens before giving the answer."
    assert said(TaskSection(), 0) == "2 + 3"


def test_the_prompt_states_a_maximum_as_one_and_nothing_where_targets_are_off() -> None:
    expected = "2 + 3\nThink for at most 2000 tokens before giving the answer."
    assert said(TaskSection(length_mode="max"), 2000) == expected
    assert said(TaskSection(length_mode="off"), 2000) == "2 + 3"


def test_without_targets_or_with_mode_off_no_group_has_a_target() -> None:
    assert TaskSection(length_targets=[10, 20]).targets == [10, 20]
    assert TaskSection(length_targets=[10, 20], length_mode="max").targets == [10, 20]
    assert TaskSection(length_targets=[10, 20], length_mode="off").targets == TaskSection().targets == []


def test_another_mode_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.length_mode.*'target', 'max' or 'off'"):
        parse({"tasks": {"length_mode": "min"}})
