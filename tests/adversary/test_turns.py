"""Every lie about what an environment said is found, and is a hard reason; the honest control is accepted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.adversary.attacks import ATTACKS, TOOL_ATTACKS, Attack, Lab, attacks_on
from benchmarks.adversary.cheats import CHEATS

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
FOUND = {
    "honest": None,
    "greedy": Reason.SAMPLING,
    "best_of_4": Reason.SAMPLING,
    "truncated": Reason.TERMINATION,
    "padded": Reason.TERMINATION,
    "easier_task_retold": Reason.SAMPLING,
    "forged_rewards": Reason.REWARD,
    "forged_logprobs": Reason.LOGPROBS,
    "constant_proofs": Reason.PROOF,
} | dict.fromkeys(TOOL_ATTACKS, Reason.ENVIRONMENT)


@pytest.fixture(scope="module")
def judge(talkative_folder: Path, echo: None) -> Iterator[Judge]:
    with Judge(config(), RUN, "float32") as judge:
        judge.load(talkative_folder)
        yield judge


def attacker(name: str, folder: Path) -> Attack:
    made = attacks_on(config())[name](config(), RUN, ALICE, TorchEngine("float32"), Lab([folder], BOB))
    made.load(folder, 0)
    return made


ASKED = offline_assignment(config(), ALICE.public, 0)


def finding(judge: Judge, data: bytes) -> Finding | None:
    case = judge.open(ASKED, ALICE.public, data)
    assert isinstance(case, Case), case
    return judge.examine([case])[0].finding


@pytest.mark.parametrize("name", list(FOUND))
def test_a_lie_is_found_for_its_reason(talkative_folder: Path, judge: Judge, name: str) -> None:
    found = finding(judge, attacker(name, talkative_folder).submission(ASKED))
    assert (found and found.reason) == FOUND[name], found
    assert found is None or found.reason in HARD


def test_the_worker_that_forges_a_tools_answer_is_found(talkative_folder: Path, judge: Judge) -> None:
    liar = workers.make_producer(talkative_folder, config(), CHEATS["forged_tool"])
    found = finding(judge, liar.submission(ASKED))
    assert found is not None and found.reason is Reason.ENVIRONMENT and found.reason in HARD


def test_the_forged_answer_is_the_tasks_own(talkative_folder: Path) -> None:
    """So that the lie pays: the model reads the answer that it is asked for."""
    liar = attacker("forged_tool", talkative_folder)
    file = read_submission(liar.submission(ASKED), max_rows=8, max_tokens=MAX_TOKENS)
    answered = [row for row in file.rows if row.turns]
    assert answered
    for row in answered:
        task = liar.tasks.train[liar.plans[row.group].task_index]
        said = liar.tokenizer.decode(row.tokens[row.turns[0] : row.turns[0] + row.turns[1]], skip_special_tokens=True)
        assert said == f"?he answer is {task.answer}."  # the tiny tokenizer has no capitals


def test_lies_about_tools_are_in_the_matrix_where_there_is_one() -> None:
    assert set(attacks_on(config())) == set(ATTACKS) | set(TOOL_ATTACKS)
    assert attacks_on(workers.config()) == ATTACKS
