"""Within an exactness class, every attack that changes a token, a logprob or a proof is rejected."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli.calibrate import RUN
from shoal.engine.torch_engine import TorchEngine
from shoal.validator.case import Case
from shoal.validator.judge import Examined, Judge

from ..model.exactness import NEEDS_EXACT
from .test_attacks import ALICE, ASSIGNMENT, CONFIG, submissions

pytestmark = [NEEDS_EXACT, pytest.mark.usefixtures("one_thread")]
EXACT = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"numerics": "exact"})})
NAMES = [
    *("honest", "int8_weights", "fp8_cache", "fp16_cache", "previous_version", "top_k_5", "top_p_0.9"),
    *("end_suppressed", "temperature_x0.7", "temperature_x1.3", "best_of_4", "spends_tolerance"),
    "spends_tolerance_down",
]


@pytest.fixture(scope="module")
def files(one_thread: None, tiny_folders: tuple[Path, Path]) -> dict[str, bytes]:
    return submissions(tiny_folders, NAMES, EXACT, TorchEngine("float32", numerics="exact"))


@pytest.fixture(scope="module")
def judge(one_thread: None, tiny_folder: Path) -> Iterator[Judge]:
    with Judge(EXACT, RUN, "float32") as judge:
        judge.load(tiny_folder)
        yield judge


def examined(judge: Judge, data: bytes, *, exact: bool = True) -> Examined:
    case = judge.open(ASSIGNMENT, ALICE.public, data)
    assert isinstance(case, Case), case
    return judge.examine([replace(case, exact=exact)])[0]


@pytest.mark.parametrize("name", NAMES)
def test_any_changed_bit_is_rejected(files: dict[str, bytes], judge: Judge, name: str) -> None:
    attack, honest = examined(judge, files[name]), examined(judge, files["honest"])
    assert honest.finding is None
    is_equal = all(
        (row.tokens, row.logprobs, row.proofs) == (own.tokens, own.logprobs, own.proofs)
        for row, own in zip(attack.case.rows, honest.case.rows, strict=True)
    )
    assert (attack.finding is None) == is_equal, attack.finding


@pytest.mark.parametrize(("name", "sign"), [("spends_tolerance", 1), ("spends_tolerance_down", -1)])
def test_spending_the_tolerance_gains_reward_only_outside_an_exactness_class(
    files: dict[str, bytes], judge: Judge, name: str, sign: int
) -> None:
    honest, attack = examined(judge, files["honest"]), examined(judge, files[name], exact=False)
    assert attack.finding is None, "the attack must stay within the limits"
    assert sign * (sum(attack.case.rewards) - sum(honest.case.rewards)) > 0, (
        "the attack must move the reward in the intended direction"
    )
    assert examined(judge, files[name]).finding is not None
