"""For each loss.kind, an update's loss equals the loss without packing. An update uses the right behaviour logprobs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.recipe import LossKind
from shoal.learner.groups import Group
from shoal.learner.policy import Policy

from .support import N_TOKENS, alone, batches, equal, make_groups, make_policy, state

pytestmark = pytest.mark.usefixtures("one_thread")

N_ROLLOUTS = sum(len(group.completions) for group in make_groups())
MAX_TOKENS = 16


def by_hand(policy: Policy, completion: list[int], prompt: list[int]) -> Tensor:
    """Return logp_T of one completion, computed by transformers without packing."""
    with torch.no_grad():
        logits_TV = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits_TV, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def objective(kind: LossKind, ratio_T: Tensor, logp_T: Tensor, behaviour_T: Tensor, advantage: float) -> Tensor:
    """Return J of a rollout's tokens, from the papers' formulas with the recipe's defaults (`LossSection`)."""
    if kind == "gspo":
        ratio_T = (logp_T - behaviour_T).mean().exp().expand_as(ratio_T)
    low, high = (1 - 3e-4, 1 + 4e-4) if kind == "gspo" else (0.8, 1.2)
    if kind in ("grpo", "dr_grpo", "gspo"):
        return torch.minimum(ratio_T.clamp(max=4.0) * advantage, ratio_T.clamp(low, high) * advantage)
    if kind == "cispo":
        return ratio_T.clamp(max=5.0) * advantage * logp_T
    moved_T = logp_T.exp() - behaviour_T.exp()
    kept_T = moved_T <= 0.2 if advantage > 0 else moved_T >= -0.2
    return kept_T * ratio_T.clamp(max=20.0) * advantage * logp_T


@pytest.mark.parametrize("row_tokens", [20, 512])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "gspo", "cispo", "dppo"])
def test_a_steps_loss_equals_a_loss_computed_rollout_by_rollout(tiny_folder, tmp_path, kind, row_tokens):
    learner = alone(tiny_folder, tmp_path, optimizer_steps_per_step=1, row_tokens=row_tokens, kind=kind)
    wanted = 0.0
    for group in make_groups():
        mean = sum(group.rewards) / len(group.rewards)
        for completion, behaviour, reward in zip(group.completions, group.behaviour, group.rewards, strict=True):
            logp_T, behaviour_T = by_hand(learner.policy, completion, group.prompt), torch.tensor(behaviour)
            ratio_T = (logp_T - behaviour_T).exp()
            loss_T = -objective(kind, ratio_T, logp_T, behaviour_T, reward - mean)
            wanted += float(loss_T.mean() if kind == "gspo" else loss_T.sum())
    wanted /= {"dr_grpo": MAX_TOKENS * N_ROLLOUTS, "gspo": N_ROLLOUTS}.get(kind, N_TOKENS)
    assert abs(wanted) > 1e-3
    assert learner.train(make_groups())["loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("row_tokens", [20, 512], ids=["one row per group", "one row"])
def test_only_unchecked_logprobs_are_recomputed(tiny_folder, tmp_path, row_tokens):
    """For unchecked groups the worker claims -4 nats per token, or -49 nats, which would dominate the batch."""
    learner = alone(tiny_folder, tmp_path, optimizer_steps_per_step=1, row_tokens=row_tokens)
    checked, *rest = make_groups()
    figures = [
        alone(tiny_folder, tmp_path, optimizer_steps_per_step=1, row_tokens=row_tokens).train(
            [checked, *(replace(group, checked=False, behaviour=claim(group)) for group in rest)]
        )
        for claim in (lambda group: group.behaviour, lambda group: [[-49.0] * len(own) for own in group.behaviour])
    ]
    assert figures[0]["loss"] == figures[1]["loss"], "the loss depends on the worker's claim"
    assert 0.0 < figures[0]["policy/mismatch_kl"] < learner.train(make_groups())["policy/mismatch_kl"]


def unchecked() -> list[Group]:
    return [replace(group, checked=False) for group in make_groups()]


def test_unchecked_logprobs_are_replaced_by_the_policys_own(tiny_folder, tmp_path):
    """The files falsely claim -4 nats for every token. If the claim is not used, the ratio in the first update is 1."""
    figures = alone(tiny_folder, tmp_path, optimizer_steps_per_step=1, row_tokens=20).train(unchecked())
    assert figures["policy/mismatch_kl"] == figures["policy/clip_low"] + figures["policy/clip_high"] == 0.0


def test_recomputed_logprobs_are_those_at_the_start_of_the_step(tiny_folder, tmp_path):
    learner = alone(tiny_folder, tmp_path, row_tokens=512, optimizer_steps_per_step=3)
    figures = learner.train(unchecked())
    assert learner.policy.updates == 3
    assert figures["policy/mismatch_kl"] > 0  # in later updates the policy differs from that at the start


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["weights", "adapters"])
@pytest.mark.parametrize("behaviour", [False, True], ids=["update", "after recomputing behaviour"])
def test_recomputed_activations_give_the_same_gradients(tiny_folder, behaviour, lora):
    both = []
    for again in (False, True):
        torch.manual_seed(0)  # adapters start at random values
        loss = {"beta": 0.01, "entropy": 0.01}
        both.append(policy := make_policy(tiny_folder, loss=loss, activation_checkpointing=again, **lora))
        for _ in range(2):
            rows = batches(20)
            if behaviour:
                rows = [replace(row, behaviour_N=policy.own_logprobs(row)) for row in rows]
            policy.update(rows, N_TOKENS)
    assert equal(*map(state, both))


def test_activation_checkpointing_computes_each_block_twice(tiny_folder, monkeypatch):
    calls = {}
    for again in (False, True):
        policy = make_policy(tiny_folder, activation_checkpointing=again)
        block, calls[again] = policy.model.model.layers[0], 0
        forward = block.self_attn.forward

        def counted(*args: Any, again: bool = again, forward: Any = forward, **kwargs: Any) -> Any:
            calls[again] += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(block.self_attn, "forward", counted)
        policy.update(batches(512), N_TOKENS)
    assert calls == {False: 1, True: 2}
