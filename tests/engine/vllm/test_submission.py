"""A validator that runs plain torch accepts honest vLLM workers and rejects cheating ones.

These tests are slow and need vLLM.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.trust.adversary.cheats import QuantizedWeights, WrongTemperature

from shoal.cli.calibrate import RUN
from shoal.config import Config, load
from shoal.engine.vllm.client import VllmEngine
from shoal.model.sources import resolve
from shoal.protocol.messages import Reason
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Examined, Judge
from shoal.worker.produce import Producer

from ...workers import ALICE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

CONFIG: Config = load(Path(__file__).parents[3] / "configs" / "tiny.toml", ["workers.groups_per_submission=8"])


@pytest.fixture(scope="module")
def engine(vllm_python: str) -> Iterator[VllmEngine]:
    engine = VllmEngine("bfloat16", 1, vllm_python)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(CONFIG, RUN, "float32") as judge:
        judge.load(resolve(CONFIG.model.name))
        yield judge


def judged(judge: Judge, engine: VllmEngine, kind: type[Producer], number: int) -> Examined:
    producer = kind(CONFIG, RUN, ALICE, engine, kind="vllm/cpu")
    producer.load(resolve(CONFIG.model.name), 0)
    assignment = offline_assignment(CONFIG, ALICE.public, number)
    case = judge.open(assignment, ALICE.public, producer.submission(assignment))
    producer.close()
    assert isinstance(case, Case), case
    assert case.header.engine == "vllm/cpu"
    return judge.examine([case])[0]


@pytest.mark.parametrize("number", range(3))
def test_honest_work_is_accepted(judge: Judge, engine: VllmEngine, number: int) -> None:
    """The worker computes in bfloat16 and the validator in float32. No other pair of dtypes differs as much."""
    examined = judged(judge, engine, Producer, number)
    assert examined.finding is None, examined.finding
    assert len(examined.case.rows) == 8 * CONFIG.sampling.group_size


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(QuantizedWeights, Reason.PROOF), (WrongTemperature, Reason.SAMPLING)],
    ids=str,
)
def test_cheating_work_is_rejected(judge: Judge, engine: VllmEngine, kind: type[Producer], reason: Reason) -> None:
    examined = judged(judge, engine, kind, 0)
    assert examined.finding is not None and examined.finding.reason is reason, examined.finding
