"""Generated task sets, the plan of a submission, prompts, rewards and length budgets."""

import doctest
import hashlib
import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from shoal import tasks
from shoal.config import parse
from shoal.config.tasks import SourceSection, TaskSection
from shoal.errors import ShoalError
from shoal.tasks.budget import reward
from shoal.tasks.derive import GroupPlan, max_rollouts, plan_groups, plan_submission
from shoal.tasks.prompt import completion_text, prompt_tokens

from ..workers import assignment

# --- the task set -------------------------------------------------------------------------------------------


def sums(heldout: int = 256, **options: Any) -> TaskSection:
    return TaskSection(sources=[SourceSection(generator="arithmetic", options=options)], heldout=heldout)


def questions(some: Sequence[tasks.Task]) -> list[str]:
    return [task.question for task in some]


def test_training_and_heldout_tasks_together_contain_every_sum_once() -> None:
    loaded = tasks.load(TaskSection())
    every = questions(loaded.train) + questions(loaded.heldout)
    assert len(loaded.heldout) == 256 and len(every) == 30 * 30
    assert set(every) == {f"{a} + {b}" for a in range(30) for b in range(30)}
    assert questions(loaded.heldout)[:10] == questions(tasks.load(sums(heldout=10)).heldout), (
        "a smaller held-out set must be the start of a larger one"
    )


def test_a_wider_range_keeps_the_order_of_a_narrower_range() -> None:
    narrow, wide = (tasks.load(sums(operand_max=n, heldout=10)) for n in (9, 29))
    ordered_narrow, ordered_wide = ([*questions(some.heldout), *questions(some.train)] for some in (narrow, wide))
    assert [question for question in ordered_wide if question in set(ordered_narrow)] == ordered_narrow


def test_too_few_tasks_are_refused_with_advice() -> None:
    with pytest.raises(ShoalError, match=r"15 tasks to train on and 10 held out; 16 and 10 are needed.*operand_max"):
        tasks.load(sums(operand_max=4, heldout=10))
    assert len(tasks.load(sums(operand_max=4, heldout=9)).train) == 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"operand_max": "x"}, "options of generator arithmetic are {'operand_max': 'x'}: give"),
        ({"operand_min": 30}, "options of generator arithmetic are {'operand_min': 30}: give"),
        ({"operand_max": 9, "operand_mx": 99}, "generator arithmetic has no option operand_mx: give operand_min"),
    ],
)
def test_the_error_names_invalid_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ShoalError, match=words):
        tasks.load(sums(**options))


def test_a_mixture_draws_each_source_by_its_weight() -> None:
    plus = SourceSection(name="plus", generator="arithmetic", weight=3)
    more = SourceSection(name="more", generator="arithmetic", options={"operand_min": 30, "operand_max": 59})
    loaded = tasks.load(TaskSection(sources=[plus, more]))
    drawn = [loaded.train[loaded.pick(hashlib.sha256(bytes([n % 256, n // 256])).digest())] for n in range(2000)]
    assert {task.source for task in loaded.heldout} == {"plus", "more"} and len(loaded.heldout) == 256
    assert 1400 < sum(task.source == "plus" for task in drawn) < 1600


# --- plans --------------------------------------------------------------------------------------------------

PLAN: dict[str, Any] = {
    "run": "run-0",
    "step": 3,
    "policy_digest": "ab" * 32,
    "worker": "cd" * 32,
    "submission": 5,
    "nonce": f"{5:032x}",
    "groups": 4,
    "group_size": 2,
    "pick": lambda drawn: int.from_bytes(drawn[:8], "big") % 644,
    "length_targets": [100, 200, 300],
}

PLANNED = [
    GroupPlan(task_index=263, target_length=300, seeds=(8153611271064757735, 3903365062890910431)),
    GroupPlan(task_index=470, target_length=300, seeds=(1102375057183595528, 2832046129886014564)),
]


def test_a_plan_is_always_the_same_and_more_groups_only_extend_it() -> None:
    assert plan_groups(**PLAN)[:2] == plan_groups(**PLAN | {"groups": 2}) == PLANNED


OTHER = {
    "run": "run-1", "step": 4, "policy_digest": "ac" * 32, "worker": "ce" * 32, "submission": 6, "nonce": "0" * 32
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OTHER.items())
def test_every_input_of_a_plan_changes_its_tasks(name: str, value: Any) -> None:
    before, after = plan_groups(**PLAN), plan_groups(**PLAN | {name: value})
    assert [plan.task_index for plan in before] != [plan.task_index for plan in after]
    seeds_before, seeds_after = ({seed for plan in plans for seed in plan.seeds} for plans in (before, after))
    if name == "policy_digest":  # other weights get other tasks, but the same sampling noise
        assert seeds_before == seeds_after
    else:
        assert not seeds_before & seeds_after


def test_seeds_are_unique() -> None:
    seeds = [seed for plan in plan_groups(**PLAN | {"groups": 50, "group_size": 16}) for seed in plan.seeds]
    assert len(set(seeds)) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_all_tasks_and_targets_are_drawn() -> None:
    plans = plan_groups(**PLAN | {"groups": 400, "pick": lambda drawn: drawn[7] % 10})
    assert {plan.task_index for plan in plans} == set(range(10))
    assert {plan.target_length for plan in plans} == {100, 200, 300}
    assert {plan.target_length for plan in plan_groups(**PLAN | {"length_targets": []})} == {0}


def test_a_submission_is_planned_from_the_config_and_its_assignment() -> None:
    sections = {"tasks": {"length_targets": [100, 200, 300]}, "workers": {"groups_per_submission": 4}}
    config = parse(sections | {"sampling": {"group_size": 2}})
    assigned = assignment(5, step=3).model_copy(update={"policy_digest": "ab" * 32, "groups": 4})
    task_set = tasks.load(config.tasks)
    plans = plan_submission(config, "run-0", assigned, "cd" * 32, task_set)
    assert plans == plan_groups(**PLAN | {"pick": task_set.pick})
    assert sum(len(plan.seeds) for plan in plans) == 8
    assert max_rollouts(config) == 2 * config.workers.largest == 64, (
        "it must be the size of a fast worker's largest submission"
    )


# --- prompts and rewards ------------------------------------------------------------------------------------

TASK = tasks.Task(id="2+3", question="2 + 3", answer="5", source="arithmetic")


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


def test_a_system_message_comes_first_if_the_config_has_one(tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}"

    class Fixed:
        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return tokenizer.apply_chat_template(messages, chat_template=template, **options)

    assert text_of(tokenizer, prompt_tokens(Fixed(), TaskSection(system="add"), TASK, 0)) == "[s]add[u]2 + 3"
    assert text_of(tokenizer, prompt_tokens(Fixed(), TaskSection(), TASK, 0)) == "[u]2 + 3"


def test_other_braces_in_a_prompt_are_literal() -> None:
    assert message(TaskSection(prompt=r"{question}, in \boxed{}"), 0) == r"2 + 3, in \boxed{}"


def test_the_text_of_a_completion_has_no_special_tokens(tokenizer: Any) -> None:
    tokens = tokenizer("5", add_special_tokens=False)["input_ids"]
    assert completion_text(tokenizer, [*tokens, tokenizer.eos_token_id]) == "5"


# --- length budgets --------------------------------------------------------------------------------------------------


class CharacterCodes:
    """A fake tokenizer that returns the user's message as character codes."""

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return {"input_ids": [ord(character) for character in messages[-1]["content"]]}


def message(section: TaskSection, target: int) -> str:
    return "".join(map(chr, prompt_tokens(CharacterCodes(), section, TASK, target)))


@pytest.mark.parametrize(
    ("score", "length", "target", "expected"),
    [(1.0, 500, 0, 1.0), (1.0, 500, 500, 1.0), (1.0, 300, 500, 0.94), (1.0, 700, 500, 0.94), (0.0, 0, 1000, -0.3)],
)
def test_a_reward_is_the_score_minus_the_penalty(score: float, length: int, target: int, expected: float) -> None:
    assert reward(score, length, target, TaskSection(length_penalty=0.0003)) == pytest.approx(expected)


def test_the_prompt_states_the_target_as_in_the_paper() -> None:
    assert message(TaskSection(), 2000) == "2 + 3\nThink for 2000 tokens before giving the answer."
    assert message(TaskSection(), 0) == "2 + 3"


@pytest.mark.parametrize(
    "name",
    [
        "compiling",
        "environments.calculator",
        "environments.python",
        "rewards.answers",
        "rewards.code",
        "sources.schemas",
    ],
)
def test_the_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"shoal.tasks.{name}")).failed == 0
