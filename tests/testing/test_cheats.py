"""Each kind of liar differs from the honest worker in exactly what it says."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from shoal.config import Cheat
from shoal.rollout.worker import Worker
from shoal.store.rollouts import Rollout, read_submission
from shoal.testing.cheats import (
    CHEATS,
    VERSIONS_BEHIND,
    ForgedReward,
    OlderWeights,
    QuantizedWeights,
    ReplayedSubmission,
    WrongTemperature,
    round_to_4_bits_,
)

from ..workers import assignment, config, make_worker

CONFIG = config(sampling={"max_tokens": 12, "group_size": 4})
pytestmark = pytest.mark.usefixtures("one_thread")


def worker(kind: type[Worker], folder: Path, version: int = 0) -> Any:
    return make_worker(folder, CONFIG, kind, version=version)


@pytest.fixture
def honest(tiny_folder: Path) -> list[Rollout]:
    return worker(Worker, tiny_folder).generate(assignment())  # type: ignore[no-any-return]


def names(rows: list[Rollout]) -> list[tuple[int, str, int, int]]:
    return [(row.group, row.task, row.target_length, row.seed) for row in rows]


def test_every_kind_of_the_config_has_a_worker() -> None:
    assert set(CHEATS) == set(get_args(Cheat)) - {""}


def test_forged_reward_changes_rewards_alone(tiny_folder: Path, honest: list[Rollout]) -> None:
    lied = worker(ForgedReward, tiny_folder).generate(assignment())
    assert [row.reward for row in lied] == [1.0] * 8 != [row.reward for row in honest]
    assert [replace(row, reward=0.0) for row in lied] == [replace(row, reward=0.0) for row in honest]


def test_wrong_temperature_names_the_right_tasks_and_draws_other_tokens(
    tiny_folder: Path, honest: list[Rollout]
) -> None:
    liar = worker(WrongTemperature, tiny_folder)
    stated = liar.sampling
    lied = liar.generate(assignment())
    assert names(lied) == names(honest)
    assert [row.tokens for row in lied] != [row.tokens for row in honest]
    assert liar.sampling == stated, "the second submission is not at a quarter"


def test_quantized_weights_round_every_linear_layer_of_each_version(
    tiny_folders: tuple[Path, Path], honest: list[Rollout]
) -> None:
    liar, true = worker(QuantizedWeights, tiny_folders[0]), worker(Worker, tiny_folders[0])
    assert names(liar.generate(assignment())) == names(honest)
    for version, folder in enumerate(tiny_folders):
        for one in (liar, true):
            one.take_weights((folder, SimpleNamespace(version=version)))
        for (name, lied), stated in zip(
            liar.engine.model.named_parameters(), true.engine.model.parameters(), strict=True
        ):
            linear = "proj" in name
            expected = stated.detach().clone()
            if linear:
                round_to_4_bits_(expected)
            assert torch.equal(lied, expected), name
            assert torch.equal(lied, stated) != linear, name
    once = [weight.clone() for weight in liar.engine.model.parameters()]
    liar.take_weights((tiny_folders[1], SimpleNamespace(version=1)))
    assert all(map(torch.equal, once, liar.engine.model.parameters())), "the same version is not rounded twice"


def test_older_weights_ask_for_no_task_until_they_are_far_enough_behind(tiny_folders: tuple[Path, Path]) -> None:
    liar = worker(OlderWeights, tiny_folders[0], version=3)
    said = [liar.node.policy_version]
    for version in range(3, 3 + VERSIONS_BEHIND + 2):
        liar.take_weights((tiny_folders[1], SimpleNamespace(version=version)))
        said.append(liar.node.policy_version)
    assert said == [None] * (VERSIONS_BEHIND + 1) + [7, 8]
    first = worker(Worker, tiny_folders[0])
    assert liar.generate(assignment()) == first.generate(assignment()), "it still has the weights that it loaded first"


def test_a_replayed_submission_is_the_first_file_for_every_later_task(tiny_folder: Path, honest: list[Rollout]) -> None:
    liar = worker(ReplayedSubmission, tiny_folder)
    for number in (0, 0, 1, 2):
        liar.hand_in(assignment(number), liar.generate(assignment(number)))
    (path_1, file_1), (path_2, file_2) = liar.node.uploads.items()
    assert (path_1, path_2) == (assignment(1).upload_path, assignment(2).upload_path), "its own task gets nothing"
    assert file_1 == file_2
    file = read_submission(file_1, max_rows=8, max_tokens=12)
    assert file.header.submission == 0 and names(file.rows) == names(honest)
