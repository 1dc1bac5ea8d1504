"""Sums, their grades, which of them a submission must hold, their prompts and rewards."""

import math
from typing import Any

import pytest

from shoal import tasks
from shoal.config import parse
from shoal.config.recipe import TaskSection
from shoal.errors import ShoalError
from shoal.tasks.derive import GroupPlan, max_rollouts, plan_groups, plan_submission
from shoal.tasks.prompt import completion_reward, completion_text, grade, prompt_tokens, reward

from ..workers import assignment

HELDOUT, TRAIN = ["22+9", "28+18", "12+8", "16+10"], ["3+25", "19+8", "3+23", "24+2"]  # by the SHA-256 of their text

# --- the task set -------------------------------------------------------------------------------------------


def ids(found: list[tasks.Task]) -> list[str]:
    return [task.id for task in found]


def test_train_and_heldout_are_all_sums_once() -> None:
    found = tasks.load(TaskSection())
    together = ids(found.train) + ids(found.heldout)
    assert len(found.heldout) == 256 and len(together) == 30 * 30
    assert set(together) == {f"{a}+{b}" for a in range(30) for b in range(30)}


def test_an_operation_given_twice_leaves_no_sum_on_both_sides() -> None:
    found = tasks.load(TaskSection(operations=["+", "+"], heldout=255))
    assert not set(ids(found.train)) & set(ids(found.heldout))


def test_the_first_tasks_are_these_on_every_machine() -> None:
    found = tasks.load(TaskSection())
    assert ids(found.heldout)[:4] == HELDOUT
    assert ids(found.train)[:4] == TRAIN
    assert found.train[0] == tasks.Task(id="3+25", question="3 + 25", answer="28")


def test_more_held_out_tasks_contain_the_fewer() -> None:
    few, many = (tasks.load(TaskSection(heldout=n)) for n in (10, 200))
    assert ids(many.heldout)[:10] == ids(few.heldout)


def test_a_wider_range_keeps_the_order_of_the_narrower() -> None:
    narrow, wide = (tasks.load(TaskSection(operand_max=n, heldout=10)) for n in (9, 29))
    both = set(ids(narrow.heldout + narrow.train))
    assert [one for one in ids(wide.heldout + wide.train) if one in both] == ids(narrow.heldout + narrow.train)


def test_differences_may_be_negative() -> None:
    found = tasks.load(TaskSection(operations=["-"]))
    answers = {task.id: task.answer for task in found.train + found.heldout}
    assert (answers["3-11"], answers["11-3"], answers["5-5"]) == ("-8", "8", "0")


def test_too_few_tasks_are_refused_with_what_to_raise() -> None:
    with pytest.raises(ValueError, match=r"25 sums .* fewer than 16 to train on after 10 .* raise tasks\.operand_max"):
        tasks.load(TaskSection(operand_max=4, heldout=10))
    assert len(tasks.load(TaskSection(operand_max=4, heldout=9)).train) == 16


# --- grades -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "answer", "grade"),
    [
        ("40", "40", 1),
        ("40", " 40\n", 1),
        ("40", "27 + 13 = 40.", 1),
        ("40", "The answer is 40, I think", 1),
        ("40", "40 or 41", 0),  # the last one counts
        ("40", "41 or 40", 1),
        ("40", "0040", 1),
        ("40", "400", 0),
        ("40", "4 0", 0),
        ("40", "-40", 0),
        ("40", "", 0),
        ("40", "forty", 0),
        ("40", "x40y", 1),
        ("40", "\u0664\u0660", 0),  # digits of another script
        ("40", "9" * 10_000, 0),  # longer than int() reads
        ("0", "0", 1),
        ("0", "000", 1),
        ("0", "", 0),
        ("-8", "-8", 1),
        ("-8", "-08", 1),
        ("-8", "8", 0),
        ("-8", "3-11=-8", 1),
        ("-8", "- 8", 0),
        ("8", "3-8", 0),  # reads as -8
        ("10", "1.10", 1),
    ],
)
def test_the_last_integer_is_the_answer(expected: str, answer: str, grade: float) -> None:
    assert tasks.load(TaskSection()).grade(tasks.Task("", "", expected), answer) == grade


# --- plans --------------------------------------------------------------------------------------------------

PLAN: dict[str, Any] = {
    "run": "run-0",
    "step": 3,
    "policy_digest": "ab" * 32,
    "worker": "cd" * 32,
    "submission": 5,
    "groups": 4,
    "group_size": 2,
    "n_tasks": 644,
    "length_targets": [100, 200, 300],
}

PLANNED = [
    GroupPlan(task_index=113, target_length=300, seeds=(9167549590003001376, 8313846361581816676)),
    GroupPlan(task_index=265, target_length=300, seeds=(1406672127642479917, 5302709662885089643)),
]


def test_a_plan_is_this_on_every_machine() -> None:
    assert plan_groups(**PLAN)[:2] == PLANNED


def test_a_plan_repeats_and_a_shorter_one_is_its_beginning() -> None:
    assert plan_groups(**PLAN) == plan_groups(**PLAN)
    assert plan_groups(**PLAN | {"groups": 2}) == plan_groups(**PLAN)[:2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("run", "run-1"), ("step", 4), ("policy_digest", "ac" * 32), ("worker", "ce" * 32), ("submission", 6)],
)
def test_every_name_of_a_submission_changes_its_tasks(name: str, value: Any) -> None:
    before, after = plan_groups(**PLAN), plan_groups(**PLAN | {name: value})
    assert [plan.task_index for plan in before] != [plan.task_index for plan in after]
    seeds_before, seeds_after = ({seed for plan in plans for seed in plan.seeds} for plans in (before, after))
    if name == "policy_digest":  # other weights draw other tasks; what the noise is they do not decide
        assert seeds_before == seeds_after
    else:
        assert not seeds_before & seeds_after


def test_no_seed_comes_twice_and_every_group_has_its_own() -> None:
    seeds = [seed for plan in plan_groups(**PLAN | {"groups": 50, "group_size": 16}) for seed in plan.seeds]
    assert len(set(seeds)) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_tasks_and_targets_are_drawn_from_all_there_are() -> None:
    plans = plan_groups(**PLAN | {"groups": 400, "n_tasks": 10})
    assert {plan.task_index for plan in plans} == set(range(10))
    assert {plan.target_length for plan in plans} == {100, 200, 300}
    assert {plan.target_length for plan in plan_groups(**PLAN | {"length_targets": []})} == {0}


def test_worker_and_validator_plan_by_the_same_call() -> None:
    config = parse(
        {
            "tasks": {"length_targets": [100, 200, 300]},
            "sampling": {"group_size": 2},
            "workers": {"groups_per_submission": 4},
        }
    )
    asked = assignment(5, step=3).model_copy(update={"policy_digest": "ab" * 32, "groups": 4})
    plans = plan_submission(config, "run-0", asked, "cd" * 32, 644)
    assert plans == plan_groups(**PLAN)
    assert sum(len(plan.seeds) for plan in plans) == max_rollouts(config) == 8


# --- prompts and rewards ------------------------------------------------------------------------------------

TASK = tasks.Task(id="2+3", question="2 + 3", answer="5")


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Any) -> Any:
    from shoal.model.load import load_tokenizer

    return load_tokenizer(tiny_folder)


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(tokens))


def test_a_prompt_is_the_chat_template_around_the_question(tokenizer: Any) -> None:
    tokens = prompt_tokens(tokenizer, TaskSection(prompt="{question} ="), TASK, 0)
    assert all(isinstance(token, int) for token in tokens)
    assert text_of(tokenizer, tokens) == "<user>2 + 3 =<eos><assistant>"


def test_a_system_message_comes_first_and_only_where_there_is_one(tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}"

    class Fixed:
        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return tokenizer.apply_chat_template(messages, chat_template=template, **options)

    assert text_of(tokenizer, prompt_tokens(Fixed(), TaskSection(system="add"), TASK, 0)) == "[s]add[u]2 + 3"
    assert text_of(tokenizer, prompt_tokens(Fixed(), TaskSection(), TASK, 0)) == "[u]2 + 3"


def test_a_length_target_is_said_in_the_prompt() -> None:
    seen = {}

    class Listening:
        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            seen["content"] = messages[-1]["content"]
            return {"input_ids": [1]}

    prompt_tokens(Listening(), TaskSection(), TASK, 2000)
    assert seen["content"] == "2 + 3\nThink for 2000 tokens before giving the answer."


def test_other_braces_in_a_prompt_are_its_own() -> None:
    class Listening:
        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return {"input_ids": [ord(character) for character in messages[-1]["content"]]}

    section = TaskSection(prompt=r"{question}, in \boxed{}")
    assert "".join(map(chr, prompt_tokens(Listening(), section, TASK, 0))) == r"2 + 3, in \boxed{}"


def test_the_text_of_a_completion_is_without_special_tokens(tokenizer: Any) -> None:
    tokens = tokenizer("5", add_special_tokens=False)["input_ids"]
    assert completion_text(tokenizer, [*tokens, tokenizer.eos_token_id]) == "5"


@pytest.mark.parametrize(
    ("grade", "length", "target", "expected"),
    [(1.0, 500, 0, 1.0), (1.0, 500, 500, 1.0), (1.0, 300, 500, 0.94), (1.0, 700, 500, 0.94), (0.0, 0, 1000, -0.3)],
)
def test_a_reward_is_the_grade_less_the_distance_to_the_target(
    grade: float, length: int, target: int, expected: float
) -> None:
    assert reward(grade, length, target, 0.0003) == pytest.approx(expected)


class OneGrade:
    """A task set whose grader gives one grade."""

    def __init__(self, value: float) -> None:
        self.train = self.heldout = [TASK]
        self.value = value

    def grade(self, task: tasks.Task, answer: str) -> float:
        return self.value


@pytest.mark.parametrize("value", [1.5, -0.1, math.nan, math.inf])
def test_a_grade_outside_of_0_to_1_stops_with_the_name_of_the_task(tokenizer: Any, value: float) -> None:
    with pytest.raises(ShoalError, match=r"gives .* for task 2\+3; grades must be within \[0, 1\]"):
        grade(OneGrade(value), TASK, "5")
    with pytest.raises(ShoalError, match=r"task 2\+3"):
        completion_reward(OneGrade(value), tokenizer, TaskSection(), TASK, 0, [5])


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_a_grade_within_0_to_1_is_the_reward_without_a_target(tokenizer: Any, value: float) -> None:
    assert completion_reward(OneGrade(value), tokenizer, TaskSection(), TASK, 0, [5]) == value
