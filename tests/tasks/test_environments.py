"""Environments: the calculator, the tokens of an answer, and when a conversation continues."""

import random
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Config, ConfigError
from shoal.model.load import load_tokenizer
from shoal.tasks import Task
from shoal.tasks.environments import ENVIRONMENTS, Conversation, environments_of
from shoal.tasks.environments.calculator import (
    MAX_CHARACTERS,
    NOT_AN_EXPRESSION,
    CalculationError,
    Calculator,
    last_call,
    to_text,
    value,
)
from shoal.tasks.prompt import ChatTemplateError, TurnFrame, delete_all

from .. import turns as conversations
from ..turns import ASSISTANT, ENDS, EOS, MAX_TOKENS, USER, config, register

TASK = Task("arithmetic/0", "2 + 3", "5", "arithmetic")


# --- calculator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("calc(12*7)", "84"),
        ("She has calc(12 * 7 - 4) apples.", "80"),
        ("calc(1)calc(2+2)", "4"),
        ("calc(2*(3+4))", "14"),
        ("calc(((1)))", "1"),
        ("calc(-3--4)", "1"),
        ("calc(1/3)", "1/3"),
        ("calc(-1/8)", "-0.125"),
        ("calc(0.1+0.2)", "0.3"),
        ("calc(.5*4.)", "2"),
        ("calc(8/2/2)", "2"),
        ("calc(7-2-1)", "4"),
        ("calc(2+3*4)", "14"),
        ("calc(-0)", "0"),
        ("calc(1/4000000)", "0.00000025"),
        ("calc(1)) and calc(2", "1"),
        ("(or calc(3)", "3"),
        ("calc(1+calc(2+3))", "5"),
        (f"calc({'1' * 201})", "error: too long"),
        ("calc(1/0)", "error: division by zero"),
        ("calc(1/(2-2))", "error: division by zero"),
        ("calc()", f"error: {NOT_AN_EXPRESSION}"),
        ("calc(2+)", f"error: {NOT_AN_EXPRESSION}"),
        ("calc(2 3)", f"error: {NOT_AN_EXPRESSION}"),
        ("calc(2**3)", "error: unexpected **"),
        ("calc(two)", "error: unexpected t"),
        ("calc(.)", f"error: {NOT_AN_EXPRESSION}"),
        ("calc(1e9)", "error: unexpected e"),
        ("calc(__import__('os'))", "error: unexpected _"),
        ("calc(\u0663)", "error: unexpected \u0663"),
        (f"calc({'9' * 31}*1)", "error: the result is too long"),
        (f"calc({'(' * 30}1{')' * 30})", "error: too many parentheses"),
        (f"calc({'-' * 150}1)", "1"),
        ("calc(007 + 0.012)", "7.012"),
        ("calc(...)", f"error: {NOT_AN_EXPRESSION}"),
        ("calc((2)(3))", f"error: {NOT_AN_EXPRESSION}"),
    ],
)
def test_the_last_call_is_answered(turn: str, answer: str) -> None:
    assert Calculator().respond(TASK, 0, ["calc(5)", turn]) == answer


@pytest.mark.parametrize("turn", ["", "84", "calc", "calc(", "calc(12*7", "calculate (12)", "calc((1)"])
def test_a_turn_without_a_complete_call_ends_the_conversation(turn: str) -> None:
    assert Calculator().respond(TASK, 0, ["calc(5)", turn]) is None


@pytest.mark.parametrize("turn", ["calc(" * 60_000, "calc(" * 60_000 + ")" * 60_000, "(" * 300_000, "calc()" * 50_000])
def test_a_turn_of_only_parentheses_gets_an_error_or_no_answer(turn: str) -> None:
    answer = Calculator().respond(TASK, 0, [turn])
    assert answer is None or answer.startswith("error: ")


@given(st.text("0123456789.+-*/() ce", max_size=MAX_CHARACTERS + 5))
def test_an_expression_raises_only_calculation_errors(text: str) -> None:
    with suppress(CalculationError):
        to_text(value(text))
    assert (last_call(f"calc({text})") is None) or Calculator().respond(TASK, 0, [f"calc({text})"])


def test_the_calculator_computes_exactly() -> None:
    draw = random.Random(0)
    for _ in range(200):
        numbers = [str(draw.randrange(1, 99)) for _ in range(5)]
        signs = [draw.choice("+-*/") for _ in range(4)]
        text = numbers[0] + "".join(sign + number for sign, number in zip(signs, numbers[1:], strict=True))
        exact = "Fraction(" + numbers[0] + ")"
        exact += "".join(f"{sign}Fraction({number})" for sign, number in zip(signs, numbers[1:], strict=True))
        result = value(text)
        assert result == eval(exact, {"Fraction": Fraction}) == Fraction(to_text(result))  # noqa: S307


# --- the tokens of an answer -----------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(tiny_folder)


def test_the_tokens_are_those_of_smollm2s_template(bundled: Path, bundled_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "12*7?"}, {"role": "assistant", "content": "calc(12*7)"}]
    # Leave out the newline at the end of the template.
    before = bundled_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"][:-1]
    whole = bundled_tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": "84"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    frame = TurnFrame(bundled_tokenizer, [bundled_tokenizer.eos_token_id])
    assert before[-1] == bundled_tokenizer.eos_token_id
    assert before + frame.tokens("84") == whole


def test_an_answer_contains_no_control_tokens(tokenizer: Any) -> None:
    frame = TurnFrame(tokenizer, ENDS)
    assert frame.tokens("84") == [USER, *tokenizer.encode("84"), EOS, ASSISTANT], (
        "the answer must be a user message of the template"
    )
    assert frame.tokens("8<eos><assistant>4") == frame.tokens("84")
    assert frame.tokens("8<e<eos>os>4") == frame.tokens("84"), "a deletion must create no control token"
    assert delete_all(["ab"], "aabb") == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('one question only') }}", "does not render a second question"),
        ("{% for m in messages[-1:] %}{{ m['content'] }}<eos>{% endfor %}", "does not write every message once"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "begins with none of the end tokens"),
        ("{% for m in messages %}{{ m['content'] }} <eos>{% endfor %}", "begins with none of the end tokens"),
    ],
)
def test_a_template_that_cannot_express_an_answer_is_an_error(tokenizer: Any, template: str, message: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match=message) as error:
        TurnFrame(tokenizer, ENDS)
    assert "remove the source's environment" in str(error.value)


# --- when a conversation continues -----------------------------------------------------------------------------------


@pytest.fixture
def conversation(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Conversation:
    register(monkeypatch)
    settings = config()
    return Conversation(settings, environments_of(settings), tokenizer, ENDS)


FIRST = [30, 31, EOS]


def test_the_environment_answers_a_turn_that_ends_with_an_end_token(conversation: Conversation, tokenizer: Any) -> None:
    answer = conversation.reply(TASK, 7, FIRST, [])
    assert answer is not None and tokenizer.decode(answer) == "<user>14<eos><assistant>"  # 7 + 2 + 5 characters


def test_an_environment_gets_no_more_of_a_task_than_a_worker_has(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker's environment could answer in another way than a validator's, and the worker be slashed."""
    seen: list[Task] = []
    monkeypatch.setattr(conversations.Echo, "respond", lambda _, task, *rest: seen.append(task))
    conversation.reply(replace(TASK, tests="{}", metadata="{}", reward="math"), 7, FIRST, [])
    assert seen == [Task("", TASK.question, "", TASK.source, metadata="{}")]


def test_an_answer_depends_on_task_seed_and_turns(conversation: Conversation) -> None:
    answer = conversation.reply(TASK, 7, FIRST, []) or []
    second = [*FIRST, *answer, 30, EOS]
    turns = [len(FIRST), len(answer)]
    assert conversation.reply(TASK, 8, FIRST, []) != answer
    assert conversation.reply(TASK, 7, second, turns) == conversation.reply(TASK, 7, [30, 30, 30, EOS], [])
    assert conversation.reply(TASK, 7, second, turns) != conversation.reply(TASK, 7, second, [])


def test_a_conversation_ends_at_each_limit(conversation: Conversation, caplog: pytest.LogCaptureFixture) -> None:
    answer = conversation.reply(TASK, 7, FIRST, []) or []
    assert conversation.reply(TASK, 7, [30, 31], []) is None, "a turn that is cut off must end the conversation"
    assert conversation.reply(TASK, 7, [30] * 5 + [EOS], []) is None, "a silent environment must end the conversation"
    room = MAX_TOKENS - len(answer)
    assert conversation.reply(TASK, 7, [0] * (room - 2) + [EOS], []) is not None
    for _ in range(2):
        assert conversation.reply(TASK, 7, [0] * (room - 1) + [EOS], []) is None, (
            "a lack of room must end the conversation"
        )
    [logged] = caplog.records
    assert f"does not fit into sampling.max_tokens = {MAX_TOKENS}" in logged.message
    turns = [3, 1, 3, 1]
    assert conversation.reply(TASK, 7, FIRST * 4, turns) is not None
    assert conversation.reply(TASK, 7, FIRST * 5, [*turns, 2, 1]) is None, "the fourth turn must be the last"
    elsewhere = Task("other/0", "2 + 3", "5", "other")
    assert conversation.reply(elsewhere, 7, FIRST, []) is None, (
        "a source without an environment must end the conversation"
    )


def test_an_honest_conversation_has_no_fault_and_a_changed_one_has_a_lie(conversation: Conversation) -> None:
    answer = conversation.reply(TASK, 7, FIRST, []) or []
    tokens, turns = [*FIRST, *answer, *[30] * 5, EOS], [len(FIRST), len(answer)]
    assert conversation.find_fault(TASK, 7, tokens, turns) is None
    assert "after turn 1 of 1" in lie(conversation, FIRST, []), "a missing answer must be a lie"
    assert "after turn 1 of 2" in lie(conversation, tokens, turns, seed=8), "another answer must be a lie"
    assert "after turn 1 of 2" in lie(conversation, tokens, [len(FIRST), len(answer) + 1])
    assert "after turn 1 of 2" in lie(conversation, tokens, [len(FIRST) - 1, len(answer) + 1])
    longer = [*tokens, *answer, 30, 30, 30, 30, 30, EOS]
    assert "after turn 2 of 3" in lie(conversation, longer, [*turns, 6, len(answer)]), "an extra answer must be a lie"


def lie(conversation: Conversation, tokens: list[int], turns: list[int], seed: int = 7) -> str:
    fault = conversation.find_fault(TASK, seed, tokens, turns)
    assert fault is not None and fault.lie
    return fault.detail


def test_a_lie_after_a_difference_that_slashes_nobody_is_found(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations.Echo, "repeatable", False)
    answer = conversation.reply(TASK, 7, FIRST, []) or []
    other = [*answer[:-3], 5, *answer[-2:]]
    doubtful, turns = [*FIRST, *other, *[30] * 5, EOS], [len(FIRST), len(other)]
    fault = conversation.find_fault(TASK, 7, doubtful, turns)
    assert fault is not None and not fault.lie
    unended = [*doubtful[:-1], 30]
    assert "after turn 2 of 3" in lie(conversation, [*unended, *answer, 30, EOS], [*turns, 6, len(answer)])


# --- configs ---------------------------------------------------------------------------------------------------------


def test_each_source_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    sources = [
        {"generator": "arithmetic", "environment": "calculator"},
        {"generator": "arithmetic", "name": "plain"},
        {"generator": "arithmetic", "name": "echoed", "environment": "echo"},
    ]
    environments = environments_of(config(tasks={"sources": sources}))
    types = {source: type(environment) for source, environment in environments.items()}
    assert types == {"arithmetic": Calculator, "echoed": conversations.Echo}


def test_the_error_for_an_unknown_environment_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"'abacus'; choose one of {', '.join(sorted(ENVIRONMENTS))}"):
        environments_of(config("abacus"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sampling": {"max_turns": 1}}, "needs sampling.max_turns of at least 2"),
        ({"tasks": {"sources": [{"generator": "arithmetic"}]}}, "needs a source with an environment"),
    ],
)
def test_several_turns_need_an_environment_and_vice_versa(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**sections)


def test_a_run_of_single_turns_needs_no_template_for_several_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    plain: Config = conversations.workers.config()
    assert Conversation(plain, environments_of(plain), tokenizer, ENDS).reply(TASK, 7, FIRST, []) is None
