"""Learning-rate schedules: what each says, and that every update uses what is said."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import ConfigError, parse
from shoal.config.recipe import LearnerSection
from shoal.learner.policy import rate

from .support import N_TOKENS, batches, make_policy, masters

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # updates 0, 1 | 2, 4, 6, 8 | 10, 99
        ("constant", [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
        ("linear", [4.0, 8.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0]),
        ("cosine", [4.0, 8.0, 8.0, 5 + 3 * 0.5**0.5, 5.0, 5 - 3 * 0.5**0.5, 2.0, 2.0]),
    ],
)
def test_the_rate_of_each_update(schedule: Any, rates: list[float]) -> None:
    section = LearnerSection(lr=8.0, warmup_steps=2, schedule=schedule, schedule_steps=10, final_lr_frac=0.25)
    assert [rate(updates, section) for updates in (0, 1, 2, 4, 6, 8, 10, 99)] == pytest.approx(rates)


def test_updates_move_by_the_rate_that_is_told(tiny_folder: Path) -> None:
    """A policy's first update moves a weight in proportion to the rate; at rate 0 not at all."""
    moved = []
    told = {"schedule": "linear", "schedule_steps": 4, "warmup_steps": 0}
    for updates in (0, 2, 4):
        policy = make_policy(tiny_folder, **told)
        policy.updates = updates
        before = masters(policy)
        figures = policy.update(batches(), N_TOKENS)
        assert figures["optim/lr"] == pytest.approx(1e-3 * (1 - updates / 4))
        after = masters(policy)
        moved.append({name: float((after[name] - before[name]).abs().mean()) for name in before})
    first, half, last = moved
    for name in first:
        assert first[name] > 0 and last[name] == 0, name
        assert half[name] == pytest.approx(first[name] / 2, rel=1e-3), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schedule": "cosine"}, "needs schedule_steps above warmup_steps = 25"),
        ({"schedule": "linear", "schedule_steps": 25}, "needs schedule_steps above warmup_steps = 25"),
        ({"schedule": "linear", "schedule_steps": 50, "final_lr_frac": 1.5}, "final_lr_frac"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"learner": changed})


def test_a_schedule_goes_on_where_it_was(tiny_folder: Path) -> None:
    """The rate follows from the number of updates alone, which a checkpoint holds."""
    policy = make_policy(tiny_folder, schedule="cosine", schedule_steps=6, warmup_steps=1)
    rates = [policy.update(batches(), N_TOKENS)["optim/lr"] for _ in range(3)]
    resumed = make_policy(tiny_folder, schedule="cosine", schedule_steps=6, warmup_steps=1)
    resumed.updates = 2
    assert resumed.update(batches(), N_TOKENS)["optim/lr"] == rates[2] < rates[1]
    assert not torch.equal(torch.tensor(rates[0]), torch.tensor(rates[2]))
