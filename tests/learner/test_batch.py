"""Groups are packed into rows. Each token appears once, with its logprob and advantage, for any row length."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.recipe import LossSection
from shoal.learner.batch import MicroBatch, group_advantages, micro_batches, with_gradient
from shoal.learner.groups import Group
from shoal.model.tree import forward_hidden


def group(first: int, lengths: list[int], rewards: list[float]) -> Group:
    """Make a group whose tokens are unique and can be identified by their logprobs."""
    completions, at = [], first
    for length in lengths:
        completions.append(list(range(at, at + length)))
        at += length
    behaviour = [[-float(token) for token in tokens] for tokens in completions]
    return Group(f"s{first}", 0, [1, 2, 3], completions, behaviour, rewards)


GROUPS = [
    group(100, [4, 5, 6, 7], [0.0, 1.0, 1.0, 0.0]),
    group(200, [12, 1, 12, 12], [1.0, 0.0, 0.0, 0.0]),  # 40 tokens, which is more than a row holds
    group(300, [0, 2], [0.0, 1.0]),
    group(400, [3, 3], [0.25, 0.75]),
]


def packed(row_tokens: int = 20, normalize_std: bool = False) -> list[MicroBatch]:
    return micro_batches(GROUPS, row_tokens=row_tokens, normalize_std=normalize_std)


@pytest.mark.parametrize("row_tokens", [15, 20, 25, 64, 512])
def test_every_token_is_packed_once_with_its_logprob_and_advantage(row_tokens):
    wanted = {}
    for each in GROUPS:
        mean = sum(each.rewards) / len(each.rewards)
        for tokens, reward in zip(each.completions, each.rewards, strict=True):
            wanted |= dict.fromkeys(tokens, reward - mean)
    result = [
        (int(token), float(behaviour), float(advantage))
        for micro in packed(row_tokens)
        for token, behaviour, advantage in zip(micro.pack.target_N, micro.behaviour_N, micro.advantage_N, strict=True)
    ]
    assert sorted(token for token, _, _ in result) == sorted(wanted)
    assert all(behaviour == -token for token, behaviour, _ in result)
    assert all(advantage == pytest.approx(wanted[token]) for token, _, advantage in result)
    assert all(len(micro.pack.tokens_T) <= row_tokens for micro in packed(row_tokens))


def test_a_row_is_as_long_as_its_longest_sequence_needs():
    """A prompt of 3 tokens and a completion of 12 do not fit a row of 8, so they get a row of 15."""
    assert max(len(micro.pack.tokens_T) for micro in packed(row_tokens=8)) == 15
    assert sum(len(micro.advantage_N) for micro in packed(row_tokens=8)) == sum(group.n_tokens for group in GROUPS)


@pytest.mark.parametrize("row_tokens", [15, 20, 512])
def test_the_tokens_of_a_rollout_share_one_index(row_tokens):
    rollouts = []
    for micro in packed(row_tokens):
        numbers, counts = torch.unique_consecutive(micro.rollout_N, return_counts=True)
        assert len(set(numbers.tolist())) == len(numbers)  # each rollout is contiguous
        rollouts += [part.tolist() for part in micro.pack.target_N.split(counts.tolist())]
    wanted = [tokens for each in GROUPS for tokens in each.completions if tokens]
    assert sorted(rollouts) == sorted(wanted)


def test_each_target_is_predicted_from_the_token_before_it(tiny_model):
    small = Group("s", 0, [5, 6], [[7, 8], [9]], [[0.0, 0.0], [0.0]], [0.0, 1.0])
    (micro,) = micro_batches([small], row_tokens=16, normalize_std=False)
    assert micro.pack.tokens_T[micro.pack.predictor_N].tolist() == [6, 7, 6]
    with torch.no_grad():
        assert forward_hidden(tiny_model, micro.pack).shape[0] == len(micro.behaviour_N) == 3


def test_groups_of_equal_rewards_have_no_gradient_without_beta_and_entropy():
    flat = group(500, [3, 3], [0.25, 0.25])
    assert with_gradient([*GROUPS, flat], LossSection(beta=0, entropy=0)) == GROUPS
    for loss in (LossSection(beta=0.1, entropy=0), LossSection(beta=0, entropy=0.1)):
        assert with_gradient([*GROUPS, flat], loss) == [*GROUPS, flat]


# --- turns -----------------------------------------------------------------------------------------------------------


def conversation(answer: list[int]) -> Group:
    """Make two completions. The first has three turns, and the environment wrote the second turn."""
    own = [[500, 501, 502, 503], [600, 601]]
    completions = [[500, 501, *answer, 502, 503], own[1]]
    behaviour = [[-float(token) for token in tokens] for tokens in own]
    return Group("s", 0, [1, 2, 3], completions, behaviour, [0.0, 1.0], [[2, len(answer)], []])


@pytest.mark.parametrize("row_tokens", [12, 64])
def test_environment_tokens_are_inputs_but_never_targets(row_tokens):
    batches = micro_batches([*GROUPS, conversation([7, 8, 9])], row_tokens=row_tokens, normalize_std=False)
    result = {
        int(target): (float(behaviour), float(advantage))
        for micro in batches
        for target, behaviour, advantage in zip(micro.pack.target_N, micro.behaviour_N, micro.advantage_N, strict=True)
    }
    assert {token: result[token] for token in (500, 501, 502, 503)} == {
        token: (-float(token), -0.5) for token in (500, 501, 502, 503)
    }
    assert not {7, 8, 9} & set(result)
    assert sum(token in (7, 8, 9) for micro in batches for token in micro.pack.tokens_T.tolist()) == 3


def test_environment_tokens_change_the_logprobs_of_later_tokens_only(tiny_model):
    logps = []
    for answer in ([7, 8, 9], [9, 7, 30]):
        large = conversation(answer)
        completions = [[token % 60 for token in tokens] for tokens in large.completions]
        small = Group("s", 0, large.prompt, completions, large.behaviour, [0, 1], large.turns)
        (micro,) = micro_batches([small], row_tokens=64, normalize_std=False)
        assert micro.pack.target_N.tolist() == [token % 60 for token in (500, 501, 502, 503, 600, 601)]
        with torch.no_grad():
            logits_NV = tiny_model.lm_head(forward_hidden(tiny_model, micro.pack)).log_softmax(-1)
        logps.append(logits_NV.gather(-1, micro.pack.target_N[:, None])[:, 0])
    before = torch.tensor([True, True, False, False, True, True])
    torch.testing.assert_close(logps[0][before], logps[1][before], atol=1e-5, rtol=0)
    assert ((logps[0] - logps[1])[~before].abs() > 1e-3).all()


REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.9, 0.0])


def test_advantages_are_rewards_minus_the_mean_optionally_divided_by_the_sample_std():
    expected = torch.tensor([0.57, -0.43, -0.18, 0.47, -0.43])
    torch.testing.assert_close(group_advantages(REWARDS, normalize_std=False), expected)
    assert float(group_advantages(REWARDS, normalize_std=True).std(correction=1)) == pytest.approx(1, abs=1e-4)
    (micro,) = packed(row_tokens=512, normalize_std=True)
    result = dict(zip(micro.pack.target_N.tolist(), micro.advantage_N.tolist(), strict=True))
    # Half of the rewards are 1, so each advantage is 1/2 or -1/2, divided by the sample std.
    size = len(GROUPS[0].completions)
    for token in GROUPS[0].completions[0]:
        assert abs(result[token]) == pytest.approx(math.sqrt((size - 1) / size), abs=1e-4)
    for dtype in (torch.float64, torch.int64, torch.bool):
        for normalize_std in (True, False):
            advantages_G = group_advantages(torch.tensor([1, 0, 0]).to(dtype), normalize_std=normalize_std)
            assert advantages_G.dtype == torch.float32


@pytest.mark.parametrize("normalize_std", [True, False])
@settings(deadline=None)
@given(reward=st.floats(-100, 100, width=32), size=st.integers(1, 64))
def test_equal_rewards_give_advantages_of_exactly_zero(normalize_std, reward, size):
    """The online filter drops a group whose advantages are all zero."""
    advantages_G = group_advantages(torch.full((size,), reward), normalize_std=normalize_std)
    assert torch.equal(advantages_G, torch.zeros(size))
