"""Each lying worker differs from the honest worker in exactly what its docstring says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.trust.adversary.cheats import (
    VERSIONS_BEHIND,
    OlderWeights,
    QuantizedWeights,
    ReplayedSubmission,
    round_to_4_bits_,
)

from shoal.engine.torch_engine import TorchEngine
from shoal.store.rollouts import Rollout, read_submission
from shoal.worker.produce import Producer

from ..workers import ALICE, RUN, assignment, config, make_producer, produced

CONFIG = config(sampling={"max_tokens": 12, "group_size": 4})
pytestmark = pytest.mark.usefixtures("one_thread")


def producer(kind: type[Producer], folder: Path, version: int = 0) -> Any:
    return make_producer(folder, CONFIG, kind, version=version)


@pytest.fixture
def honest(tiny_folder: Path) -> list[Rollout]:
    return produced(producer(Producer, tiny_folder), assignment())


def names(rows: list[Rollout]) -> list[tuple[int, str, int, int]]:
    return [(row.group, row.task, row.target_length, row.seed) for row in rows]


def test_quantized_weights_round_every_linear_layer_of_each_version(
    tiny_folders: tuple[Path, Path], honest: list[Rollout]
) -> None:
    liar, true = producer(QuantizedWeights, tiny_folders[0]), producer(Producer, tiny_folders[0])
    assert names(produced(liar, assignment())) == names(honest)
    for version, folder in enumerate(tiny_folders):
        for worker in (liar, true):
            assert worker.load(folder, version) == version
        for (name, lied), stated in zip(
            liar.engine.model.named_parameters(), true.engine.model.parameters(), strict=True
        ):
            is_linear = "proj" in name
            expected = stated.detach().clone()
            if is_linear:
                round_to_4_bits_(expected)
            assert torch.equal(lied, expected), name
            assert torch.equal(lied, stated) != is_linear, name
    once = [weight.clone() for weight in liar.engine.model.parameters()]
    liar.load(tiny_folders[1], 1)
    assert all(map(torch.equal, once, liar.engine.model.parameters())), "the same version is not rounded twice"


def test_older_weights_request_no_task_until_they_are_old_enough(tiny_folders: tuple[Path, Path]) -> None:
    liar = OlderWeights(CONFIG, RUN, ALICE, TorchEngine("float32"))
    claimed = [liar.load(tiny_folders[0], 3)]
    claimed += [liar.load(tiny_folders[1], version) for version in range(4, 3 + VERSIONS_BEHIND + 2)]
    assert claimed == [None] * VERSIONS_BEHIND + [7, 8]
    first = producer(Producer, tiny_folders[0])
    lied = produced(liar, assignment())
    assert lied == produced(first, assignment()), "it uses the weights that it loaded first"


def test_a_replayed_submission_has_the_same_rollouts_for_every_task(tiny_folder: Path) -> None:
    liar = producer(ReplayedSubmission, tiny_folder)
    files = [read_submission(liar.submission(assignment(n)), max_rows=8, max_tokens=12) for n in (4, 5, 6)]
    assert [file.header.submission for file in files] == [4, 5, 6]
    assert len({file.header.content for file in files}) == 1
    other = assignment(4).model_copy(update={"number": 4 + 999})  # a task that it was never assigned
    assert names(files[0].rows) == names(produced(producer(Producer, tiny_folder), other))
