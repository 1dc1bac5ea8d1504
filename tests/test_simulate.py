"""The simulated pool of `benchmarks/pool/simulate` agrees with closed forms."""

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.pool.simulate import pool


def setting(**changed: Any) -> Any:
    """Return a pool of one worker, validator and learner.

    A batch is one submission, which takes 40 s to generate, 4 s to check and 20 s to train on.
    """
    rig = pool.Rig(group_s=10.0, groups=4, fetch_s=5.0, load_s=1.0, upload_s=2.0)
    own = {"steps": 12, "async_level": 0, "batch": 4, "rigs": [rig], "validators": 1, "validate_s": 1.0}
    return pool.Setting(**(own | {"validate_start_s": 0.0, "train_s": 20.0, "publish_s": 3.0} | changed))


def test_at_level_0_a_step_is_the_sum_of_its_parts() -> None:
    found = pool.Pool(setting()).run()
    assert found.step_s == pytest.approx(40 + 2 + 4 + 20 + 3 + 5 + 1)
    assert found.learner == pytest.approx(12 * 20 / found.seconds)
    assert found.generating == pytest.approx(12 * 40 / found.seconds)
    assert found.validators == pytest.approx(12 * 4 / found.seconds)
    assert (found.staleness, found.wasted) == (0.0, 0.0)


@pytest.mark.parametrize(("train_s", "step_s"), [(20.0, 46.0), (90.0, 90.0)])
def test_at_a_high_level_a_step_is_its_slowest_part(train_s: float, step_s: float) -> None:
    """The worker waits for each verdict, so generating, uploading and checking are one part of 40 + 2 + 4 s."""
    found = pool.Pool(setting(async_level=4, train_s=train_s, steps=40)).run()
    assert found.step_s == pytest.approx(step_s, abs=1.1)


def test_several_workers_share_a_batch() -> None:
    rigs = [pool.Rig(group_s=10.0, groups=1)] * 4
    found = pool.Pool(setting(rigs=rigs, validators=4, publish_s=0.0)).run()
    assert found.step_s == pytest.approx(10 + 1 + 20)


def test_each_group_without_a_signal_costs_one_more_group() -> None:
    whole = pool.Pool(setting(async_level=4, batch=64, steps=20)).run()
    half = pool.Pool(setting(async_level=4, batch=64, steps=20, useful=0.5)).run()
    assert half.step_s == pytest.approx(2 * whole.step_s, rel=0.1)


def test_no_group_is_older_than_the_level_allows_and_links_fetch_only_the_newest_version() -> None:
    """Versions arrive more slowly than steps end, so the worker skips some and waits for one that is young enough."""
    slow = pool.Rig(group_s=1.0, groups=4, fetch_s=200.0)
    base = setting(rigs=[slow], train_s=5.0, publish_s=0.0, steps=40)
    ages = [pool.Pool(replace(base, async_level=level)).run() for level in (0, 1, 2, 4)]
    assert all(found.staleness <= level for found, level in zip(ages, (0, 1, 2, 4), strict=True))
    assert [found.step_s for found in ages] == sorted((found.step_s for found in ages), reverse=True)
    assert ages[0].step_s == pytest.approx(4 + 4 + 5 + 200, abs=0.1)
    assert ages[3].links > 0.9


def test_a_pool_without_events_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="no event is left at step 0"):
        pool.Pool(setting(rigs=[])).run()
