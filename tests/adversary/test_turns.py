"""Every lie about an environment's answers is rejected for a hard reason. An honest file is accepted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.trust.adversary.attacks import ATTACKS, TOOL_ATTACKS, Attack, Lab, attacks_on
from benchmarks.trust.adversary.cheats import CHEATS

from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.messages import HARD, Reason
from shoal.store.rollouts import read_submission
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case, Finding
from shoal.validator.judge import Judge

from .. import workers
from ..turns import MAX_TOKENS, config
from ..workers import ALICE, BOB, RUN

pytestmark = pytest.mark.usefixtures("one_thread", "echo")
REASONS = {
    "honest": None,
    "greedy": Reason.SAMPLING,
    "best_of_4": Reason.SAMPLING,
    "truncated": Reason.TERMINATION,
    "padded": Reason.TERMINATION,
    "easier_task_retold": Reason.SAMPLING,
    "forged_logprobs": Reason.LOGPROBS,
    "constant_proofs": Reason.PROOF,
} | dict.fromkeys(TOOL_ATTACKS, Reason.ENVIRONMENT)


@pytest.fixture(scope="module")
def judge(talkative_folder: Path, echo: None) -> Iterator[Judge]:
    with Judge(config(), RUN, "float32") as judge:
        judge.load(talkative_folder)
        yield judge


def attacker(name: str, folder: Path) -> Attack:
    attacker = attacks_on(config())[name](config(), RUN, ALICE, TorchEngine("float32"), Lab([folder], BOB))
    attacker.load(folder, 0)
    return attacker


ASSIGNMENT = offline_assignment(config(), ALICE.public, 0)


def finding(judge: Judge, data: bytes) -> Finding | None:
    case = judge.open(ASSIGNMENT, ALICE.public, data)
    assert isinstance(case, Case), case
    return judge.examine([case])[0].finding


@pytest.mark.parametrize("name", list(REASONS))
def test_each_lie_is_rejected_for_the_expected_reason(talkative_folder: Path, judge: Judge, name: str) -> None:
    result = finding(judge, attacker(name, talkative_folder).submission(ASSIGNMENT))
    assert (result and result.reason) == REASONS[name], result
    assert result is None or result.reason in HARD


def test_a_worker_that_forges_a_tools_answer_is_detected(talkative_folder: Path, judge: Judge) -> None:
    liar = workers.make_producer(talkative_folder, config(), CHEATS["forged_tool"])
    result = finding(judge, liar.submission(ASSIGNMENT))
    assert result is not None and result.reason is Reason.ENVIRONMENT and result.reason in HARD


def test_the_forged_answer_contains_the_tasks_own_answer(talkative_folder: Path) -> None:
    """The lie pays only if the model reads the answer that it has to give."""
    liar = attacker("forged_tool", talkative_folder)
    file = read_submission(liar.submission(ASSIGNMENT), max_rows=8, max_tokens=MAX_TOKENS)
    rows = [row for row in file.rows if row.turns]
    assert rows
    for row in rows:
        task = liar.tasks.train[liar.plans[row.group].task_index]
        start, length = row.turns[:2]
        text = liar.tokenizer.decode(row.tokens[start : start + length], skip_special_tokens=True)
        assert text == f"?he answer is {task.answer}."  # the tiny tokenizer has no capitals


def test_only_runs_with_an_environment_are_attacked_with_lies_about_tools() -> None:
    assert set(attacks_on(config())) == set(ATTACKS) | set(TOOL_ATTACKS)
    assert attacks_on(workers.config()) == ATTACKS
