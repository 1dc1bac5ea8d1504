"""A multi-turn submission goes from worker to validator to learner."""

from dataclasses import replace

import pytest
import torch

from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group, implausible_value
from shoal.learner.loss import denominator
from shoal.store.rollouts import read_accepted

from ..turns import MAX_TOKENS, config
from ..validator.support import ASSIGNMENT, checked, claim, make_producer, make_validator
from .support import make_policy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def groups(talkative_folder, echo) -> list[Group]:
    """The groups that the learner reads from the accepted file."""
    validator = make_validator(talkative_folder, config())
    verdict, data = checked(validator, claim(), make_producer(talkative_folder, config()).submission(ASSIGNMENT))
    validator.judge.quarantine.close()
    assert data is not None, verdict.detail
    rows = read_accepted(data, max_rows=8, max_tokens=512).rows
    return [
        Group(
            submission="s",
            policy_version=0,
            prompt=part[0].prompt,
            completions=[row.tokens for row in part],
            behaviour=[row.logprobs for row in part],
            rewards=[float(n) for n in range(len(part))],
            turns=[row.turns for row in part],
        )
        for part in (rows[:4], rows[4:])
    ]


def test_the_learners_logprobs_equal_those_in_the_file(talkative_folder, groups):
    """Because they are equal, a row's behaviour logprobs and targets must belong to the same tokens."""
    policy = make_policy(talkative_folder)
    assert any(turns for group in groups for turns in group.turns)
    assert [implausible_value(group) for group in groups] == ["", ""]
    for row_tokens in (64, 512):
        batches = micro_batches(groups, row_tokens=row_tokens, normalize_std=False)
        assert sum(len(micro.behaviour_N) for micro in batches) == sum(group.n_tokens for group in groups)
        for micro in batches:
            with torch.no_grad():
                logp_N, _ = policy.logprobs(micro.pack)
            torch.testing.assert_close(logp_N, micro.behaviour_N, atol=2e-3, rtol=0)


def test_only_the_models_tokens_have_a_gradient(talkative_folder, groups):
    """At a ratio of 1, grpo has the gradient of sum(advantage * logp) over the model's tokens."""
    n_tokens = sum(group.n_tokens for group in groups)
    assert n_tokens < sum(len(tokens) for group in groups for tokens in group.completions)
    over = denominator("grpo", n_tokens, 8, MAX_TOKENS)
    policy = make_policy(talkative_folder)
    for micro in micro_batches(groups, row_tokens=512, normalize_std=False):
        on_policy = replace(micro, behaviour_N=policy.own_logprobs(micro))
        (policy._loss(on_policy)[0] / over).backward()
    masters = list(policy.masters.values())
    gradients = [master.grad for master in masters]
    for master in masters:
        master.grad = None
    for group in groups:
        mean = sum(group.rewards) / len(group.rewards)
        for tokens, turns, reward in zip(group.completions, group.turns, group.rewards, strict=True):
            whole = torch.tensor([[*group.prompt, *tokens]])
            logp_TV = policy.model(whole).logits[0].float().log_softmax(-1)
            at = 0
            for number, length in enumerate([*turns, len(tokens) - sum(turns)]):
                if number % 2 == 0:
                    here = torch.arange(at, at + length)
                    logp = logp_TV[here + len(group.prompt) - 1, torch.tensor(tokens)[here]]
                    (-(reward - mean) * logp.sum() / over).backward(retain_graph=True)
                at += length
    for gradient, master in zip(gradients, masters, strict=True):
        assert float((gradient - master.grad).norm()) <= 1e-3 * float(master.grad.norm()) + 1e-7
