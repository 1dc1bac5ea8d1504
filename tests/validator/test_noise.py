"""With `sampling.noise = "vllm"` honest work is accepted, and who draws with other noise or another temperature is not."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.adversary.cheats import WrongTemperature

from shoal.engine.protocol import Completion
from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.messages import Reason
from shoal.tasks.derive import GroupPlan
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Examined, Judge
from shoal.worker.produce import Producer

from ..workers import ALICE, RUN, config

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = config(sampling={"max_tokens": 24, "group_size": 4, "noise": "vllm"}, validator={"row_tokens": 128})


class OtherNoise(Producer):
    """Draws with Shoal's noise."""

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        self.sampling = replace(self.sampling, noise="shoal")
        return super().complete(prompts, plans)


@pytest.fixture(scope="module")
def judge(one_thread: None, talkative_folder: Path) -> Iterator[Judge]:
    with Judge(SETTINGS, RUN, "float32") as judge:
        judge.load(talkative_folder)
        yield judge


def judged(judge: Judge, kind: type[Producer], folder: Path) -> Examined:
    worker, asked = kind(SETTINGS, RUN, ALICE, TorchEngine("float32")), offline_assignment(SETTINGS, ALICE.public, 0)
    worker.load(folder, 0)
    case = judge.open(asked, ALICE.public, worker.submission(asked))
    worker.close()
    assert isinstance(case, Case), case
    return judge.examine([case])[0]


def test_honest_work_is_accepted_and_its_tokens_are_their_seeds(judge: Judge, talkative_folder: Path) -> None:
    examined = judged(judge, Producer, talkative_folder)
    assert examined.finding is None, examined.finding
    assert float((examined.case.computed().margins_N > 0).double().mean()) < 0.01


@pytest.mark.parametrize("kind", [OtherNoise, WrongTemperature])
def test_other_tokens_than_the_noise_yields_are_rejected(
    judge: Judge, talkative_folder: Path, kind: type[Producer]
) -> None:
    examined = judged(judge, kind, talkative_folder)
    assert examined.finding is not None and examined.finding.reason is Reason.SAMPLING, examined.finding
