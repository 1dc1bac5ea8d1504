import math

import pytest

from shoal.config.recipe import GuardSection
from shoal.learner.guard import Decision, judge

STOP, SKIP = GuardSection(max_grad_norm=2.0), GuardSection(max_grad_norm=2.0, action="skip")


def test_an_update_within_the_bound_goes_on() -> None:
    assert judge(0, -0.5, 2.0, STOP, skipped_in_row=0) == Decision("update")


def test_no_bound_is_set_by_default() -> None:
    assert judge(0, 0.1, 1e30, GuardSection(), skipped_in_row=0).action == "update"


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (0.1, math.nan), (0.1, math.inf)])
@pytest.mark.parametrize(("settings", "action"), [(GuardSection(), "stop"), (SKIP, "skip")], ids=["stop", "skip"])
def test_what_is_no_number_never_goes_on(loss: float, norm: float, settings: GuardSection, action: str) -> None:
    assert judge(3, loss, norm, settings, skipped_in_row=0).action == action


def test_skips_end_after_as_many_in_a_row_as_allowed() -> None:
    assert [judge(9, 0.1, 2.5, SKIP, skipped_in_row=n).action for n in range(5)] == ["skip"] * 3 + ["stop"] * 2


@pytest.mark.parametrize(("settings", "skipped"), [(STOP, 0), (SKIP, 3)], ids=["at once", "after skips"])
def test_a_stop_names_update_value_bound_and_what_to_lower(settings: GuardSection, skipped: int) -> None:
    why = judge(7, 0.1, 2.5, settings, skipped_in_row=skipped).why
    for words in ("update 7", "2.5", "learner.guard.max_grad_norm = 2", "lower learner.lr"):
        assert words in why
