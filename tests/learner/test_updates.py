"""A step's updates have the right groups and denominators and follow AdamW, and their rows are dealt to the ranks."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.learner.batch import Row, micro_batches, plan
from shoal.learner.groups import Group
from shoal.learner.policy import BETAS
from shoal.learner.ranks import Ranks
from shoal.learner.report import Shape, forward_flops
from shoal.learner.updates import cost, deal, dealing_order, decode, encode, idle_frac

from .support import alone, batches, equal, make_groups, make_policy, state

pytestmark = pytest.mark.usefixtures("one_thread")

UPDATES, MAX_TOKENS = 8, 16
# Gradients are not clipped, because a clipped gradient does not show its denominator.
SECTION: dict[str, Any] = {"grad_clip": 1e9, "optimizer_steps_per_step": UPDATES, "row_tokens": 64}


def groups(count: int = 11) -> list[Group]:
    """Make groups of 2 to 5 completions of different lengths. In every third group all rewards are equal."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        size = 2 + number % 4
        completions = [torch.randint(4, 60, (1 + (number * 3 + i) % 6,), generator=draw).tolist() for i in range(size)]
        rewards = [1.0] * size if number % 3 == 2 else [float(i % 2) for i in range(size)]
        made.append(Group(f"s{number}", 0, [2, 9], completions, [[-4.0] * len(c) for c in completions], rewards))
    return made


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dr_grpo"])
def test_each_of_eight_updates_has_its_own_share_and_denominator(tiny_folder, tmp_path, kind):
    """The denominator counts all tokens and rollouts of the share, including groups without a gradient."""
    trained = alone(tiny_folder, tmp_path, kind=kind, **SECTION)
    by_hand = make_policy(tiny_folder, loss={"kind": kind}, grad_clip=1e9)
    figures, losses = trained.train(groups()), []
    for first in range(UPDATES):
        share = groups()[first::UPDATES]
        n_tokens = sum(len(completion) for group in share for completion in group.completions)
        n_rollouts = sum(len(group.completions) for group in share)
        over = {"grpo": n_tokens, "gspo": n_rollouts, "dr_grpo": MAX_TOKENS * n_rollouts}[kind]
        useful = [group for group in share if len(set(group.rewards)) > 1]
        rows = micro_batches(useful, row_tokens=64, normalize_std=False)
        losses.append(by_hand.update(rows, float(over))["loss"])
    assert trained.policy.updates == UPDATES
    assert figures["loss"] == pytest.approx(sum(losses) / UPDATES)
    # The state includes the moments, which depend on the size of each gradient.
    assert equal(state(trained.policy), state(by_hand))


def test_fewer_groups_than_updates_get_one_update_each(tiny_folder, tmp_path):
    trained = alone(tiny_folder, tmp_path, **SECTION)
    trained.train(groups(3))
    assert trained.policy.updates == 3


def test_the_ratio_of_every_update_is_relative_to_the_sampling_policy(tiny_folder, tmp_path):
    """Therefore the ratio is 1 in the first update and not in the second.

    Relative to the policy before each update, it would be 1 in both.
    """
    trained = alone(tiny_folder, tmp_path, **SECTION | {"optimizer_steps_per_step": 2})
    on_policy = []
    for group in groups(2):
        [row] = micro_batches([group], row_tokens=512, normalize_std=False)
        parts = torch.split(trained.policy.own_logprobs(row), [len(completion) for completion in group.completions])
        on_policy.append(replace(group, behaviour=[part.tolist() for part in parts]))
    seen: list[float] = []
    apply = trained.policy.apply

    def watched(sums: Any, over: float) -> dict[str, float]:
        seen.append(sums["policy/mismatch_kl"])
        return apply(sums, over)

    trained.policy.apply = watched  # type: ignore[method-assign]
    trained.train(on_policy)
    assert seen[0] == pytest.approx(0.0, abs=1e-6) and seen[1] > 1e-4


def test_updates_follow_adamw_at_the_configured_rate(tiny_folder, monkeypatch):
    """Compare with the formula of arXiv 1711.05101 in float64, over three updates of the warm-up."""
    (beta1, beta2), lr = BETAS, 2e-3
    trained = make_policy(tiny_folder, lr=lr, warmup_steps=5, grad_clip=1e9)
    name = "model.layers.0.mlp.up_proj.weight"
    wanted = trained.masters[name].detach().double().clone()
    first, second = torch.zeros_like(wanted), torch.zeros_like(wanted)
    grads: list[torch.Tensor] = []
    step = trained.optimizer.step

    def watched() -> None:
        grad = trained.masters[name].grad
        assert grad is not None
        grads.append(grad.double().clone())
        step()

    monkeypatch.setattr(trained.optimizer, "step", watched)
    for n in range(1, 4):
        trained.update(batches(), 1.0)
        rate = lr * n / 5
        first = beta1 * first + (1 - beta1) * grads[-1]
        second = beta2 * second + (1 - beta2) * grads[-1] ** 2
        moved = (first / (1 - beta1**n)) / ((second / (1 - beta2**n)).sqrt() + 1e-8)
        wanted = wanted - rate * moved
    torch.testing.assert_close(trained.masters[name].detach().double(), wanted, rtol=1e-5, atol=1e-7)


# --- dealing ------------------------------------------------------------------------------------------------------------

SMALL = Shape(body=1000, head=64, layers=2, width=8)


def several() -> list[Group]:
    """Return three groups: one with several turns, one unchecked, and a plain one."""
    first, second, third = make_groups()
    turns = [[1, 1], [], [2, 1], []]
    behaviour = [logprobs[: len(logprobs) - bool(own)] for logprobs, own in zip(first.behaviour, turns, strict=True)]
    return [replace(first, turns=turns, behaviour=behaviour), replace(second, checked=False), third]


def planned(known: list[Any], row_tokens: int = 12) -> list[Row]:
    return plan(known, row_tokens=row_tokens)


class Wired(Ranks):
    """One of several ranks in this process. The leader leaves its messages to the ranks in `box`."""

    box: list[bytes] = []

    def deal(self, messages: Any, size_bytes: int) -> bytes:
        if messages is not None:
            self.box[:] = messages
        assert len(self.box[self.rank]) == size_bytes, "the message must have the size that the rank expects"
        return self.box[self.rank]


def assert_same_row(result: Any, wanted: Any) -> None:
    for name in ("tokens_T", "positions_T", "predictor_N", "target_N"):
        assert torch.equal(getattr(result.pack, name), getattr(wanted.pack, name)), name
    assert result.pack.layout.spans == wanted.pack.layout.spans
    for name in ("behaviour_N", "advantage_N", "rollout_N"):
        assert torch.equal(getattr(result, name).nan_to_num(9.0), getattr(wanted, name).nan_to_num(9.0)), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_gets_its_own_rows_and_together_they_are_the_rows_of_a_single_rank(size):
    wanted = micro_batches(several(), row_tokens=12, normalize_std=False)
    outlines = [group.outline for group in several()]
    dealt = [deal(planned(several() if rank == 0 else outlines), Wired(rank, size)) for rank in range(size)]
    result = [row for own in dealt for each in own if (row := each.packed(normalize_std=False)) is not None]
    assert len(result) == len(wanted) > 4
    by_tokens = {tuple(micro.pack.tokens_T.tolist()): micro for micro in result}
    for micro in wanted:
        assert_same_row(by_tokens[tuple(micro.pack.tokens_T.tolist())], micro)
    together = [[each.checked for each in own] for own in dealt]
    assert all(flags == together[0] for flags in together), "all ranks must know in which turns rows are unchecked"
    assert set(together[0]) == {True, False}


def test_a_message_about_other_rows_is_refused():
    rows = planned(several())
    data = encode([row.contents() for row in rows])
    assert len(data) == 4 * sum(row.n_tokens + row.n_trained for row in rows)
    with pytest.raises(ValueError, match="the ranks planned different rows"):
        decode(data, rows[:-1])


def test_rows_are_dealt_costliest_first():
    groups = make_groups()
    (row,) = plan(groups, row_tokens=512)
    flops = [forward_flops(SMALL, len(g.prompt), [len(c) for c in g.completions]) for g in groups]
    assert cost(row, SMALL) == pytest.approx(sum(flops))
    costs = [3.0, 9.0, 1.0, 9.0]
    assert [dealing_order(costs, 1), dealing_order(costs, 2)] == [[0, 1, 2, 3], [1, 3, 0, 2]]
    assert dealing_order([], 2) == []


def test_dealing_by_cost_reduces_the_ranks_idle_time():
    assert idle_frac([4.0, 2.0, 3.0, 3.0], 2) == pytest.approx(2 / 14)
    assert idle_frac([5.0], 2) == pytest.approx(0.5)  # the other rank idles
    assert idle_frac([4.0, 2.0, 3.0], 1) == idle_frac([], 2) == 0
    draw = random.Random(0)
    costs = [draw.uniform(1, 3) for _ in range(64)]
    dealt = [costs[number] for number in dealing_order(costs, 8)]
    assert idle_frac(costs, 8) > 0.2 and idle_frac(dealt, 8) < 0.1
