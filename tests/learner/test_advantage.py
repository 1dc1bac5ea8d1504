import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.learner.advantage import group_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.9, 0.0])


def test_advantages_are_rewards_minus_their_mean() -> None:
    expected = torch.tensor([0.57, -0.43, -0.18, 0.47, -0.43])
    torch.testing.assert_close(group_advantages(REWARDS, normalize_std=False), expected)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_have_mean_zero(normalize_std: bool) -> None:
    assert float(group_advantages(REWARDS, normalize_std=normalize_std).mean()) == pytest.approx(0, abs=1e-6)


def test_normalised_advantages_have_a_samples_std_of_one() -> None:
    """As in TRL and verl: a group is a sample of the policy's completions."""
    assert float(group_advantages(REWARDS, normalize_std=True).std(correction=1)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("normalize_std", [True, False])
@settings(deadline=None)
@given(reward=st.floats(-100, 100, width=32), size=st.integers(1, 64))
def test_equal_rewards_give_exactly_zero(normalize_std: bool, reward: float, size: int) -> None:
    """Exactly, because the online filter drops a group whose advantages are all zero."""
    advantages_G = group_advantages(torch.full((size,), reward), normalize_std=normalize_std)
    assert torch.equal(advantages_G, torch.zeros(size))


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_advantages_are_float32_whatever_the_rewards_are(dtype: torch.dtype, normalize_std: bool) -> None:
    rewards_G = torch.tensor([1, 0, 0]).to(dtype)
    assert group_advantages(rewards_G, normalize_std=normalize_std).dtype == torch.float32


def test_one_right_answer_among_wrong_ones_has_the_only_positive_advantage() -> None:
    assert (group_advantages(torch.tensor([0.0, 0.0, 1.0, 0.0]), normalize_std=True) > 0).tolist() == [
        False, False, True, False,
    ]  # fmt: skip
