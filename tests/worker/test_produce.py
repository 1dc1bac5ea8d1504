"""A submission's tasks, rewards, proofs and header follow from its assignment."""

from pathlib import Path
from typing import Any

import pytest

from shoal import toploc
from shoal.engine.torch_engine import TorchEngine
from shoal.store.rollouts import RolloutFile, prompts_digest, read_submission
from shoal.worker.produce import Producer

from ..workers import ALICE, RUN, assignment, config, make_producer, produced

CONFIG = config(tasks={"length_targets": [4, 6]}, sampling={"max_tokens": 6, "group_size": 3})
pytestmark = pytest.mark.usefixtures("one_thread")


def read(data: bytes) -> RolloutFile[Any]:
    return read_submission(data, max_rows=6, max_tokens=6)


def test_the_content_of_a_submission_follows_from_its_assignment(tiny_folder: Path) -> None:
    producer = make_producer(tiny_folder, CONFIG, version=3)
    given = assignment(5, step=5, version=3)
    file = read(producer.submission(given))
    header = file.header
    assert (header.run, header.step, header.submission, header.policy_version) == (RUN, 5, 5, 3)
    assert header.policy_digest == given.policy_digest
    assert header.signer == header.worker == ALICE.public
    assert header.prompts == prompts_digest([producer.prompt(plan) for plan in producer.plan(given)])
    assert [row.group for row in file.rows] == [0, 0, 0, 1, 1, 1]
    assert len({row.seed for row in file.rows}) == 6
    for row in file.rows:
        assert row.target_length in (4, 6) and len(row.logprobs) == len(row.tokens)
    assert producer.tokens == sum(len(row.tokens) for row in file.rows)


def test_the_same_assignment_gives_the_same_rows_twice(tiny_folder: Path) -> None:
    files = [make_producer(tiny_folder, CONFIG).submission(assignment(1, step=1)) for _ in range(2)]
    assert list(read(files[0]).rows) == list(read(files[1]).rows), "a restart must not give other rows"


def test_proofs_commit_to_the_hidden_states_of_the_tokens(tiny_folder: Path) -> None:
    producer = make_producer(tiny_folder, CONFIG)
    plans = producer.plan(assignment())
    groups = producer.engine.generate(
        [producer.prompt(plan) for plan in plans], [plan.seeds for plan in plans], producer.sampling
    )
    for row, completion in zip(produced(producer, assignment()), [c for group in groups for c in group], strict=True):
        assert row.proofs == toploc.build(completion.hidden_TH)


def test_a_newer_version_is_reported_and_used(tiny_folders: tuple[Path, Path]) -> None:
    producer = Producer(CONFIG, RUN, ALICE, TorchEngine("float32"))
    made = []
    for version, folder in enumerate(tiny_folders):
        assert producer.load(folder, version) == version
        made.append(produced(producer, assignment()))
    assert made[0] != made[1] == produced(make_producer(tiny_folders[1], CONFIG), assignment())
