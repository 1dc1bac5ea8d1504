"""A step of several updates, as the recipe has it: what each is made of, and that AdamW does what its settings say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import parse
from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy

from .support import batches, equal, make_policy, state

pytestmark = pytest.mark.usefixtures("one_thread")

UPDATES, MAX_TOKENS = 8, 16
FREE = {"lr": 1e-3, "warmup_steps": 0, "grad_clip": 1e9}  # a clipped gradient would not show its denominator


def groups(count: int = 11) -> list[Group]:
    """Of 2 to 5 completions and of other lengths each; in every third, all rewards are equal."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        size = 2 + number % 4
        completions = [torch.randint(4, 60, (1 + (number * 3 + i) % 6,), generator=draw).tolist() for i in range(size)]
        rewards = [1.0] * size if number % 3 == 2 else [float(i % 2) for i in range(size)]
        made.append(Group(f"s{number}", 0, [2, 9], completions, [[-4.0] * len(c) for c in completions], rewards))
    return made


def learner(folder: Path, out: Path, kind: str, **changed: Any) -> Learner:
    section = FREE | {"optimizer_steps_per_step": UPDATES, "row_tokens": 64} | changed
    section["loss"] = {"kind": kind, "beta": 0.0, "entropy": 0.0}
    config = parse(
        {"learner": section, "sampling": {"max_tokens": MAX_TOKENS}, "coordinator": {"prompts_per_step": 16}}
    )
    return Learner(None, config, Policy(folder, config.learner, "float32", "cpu", 1.0), out)


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dr_grpo"])
def test_eight_updates_are_of_equal_shares_each_over_its_own_denominator(
    tiny_folder: Path, tmp_path: Path, kind: str
) -> None:
    """All tokens and rollouts of a share count, those of groups that teach nothing as well, and of no other share."""
    trained = learner(tiny_folder, tmp_path, kind)
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
    assert equal(state(trained.policy), state(by_hand))  # the moments show each gradient's size


def test_fewer_groups_than_updates_are_an_update_each(tiny_folder: Path, tmp_path: Path) -> None:
    trained = learner(tiny_folder, tmp_path, "grpo")
    trained.train(groups(3))
    assert trained.policy.updates == 3


def test_the_ratio_of_every_update_is_to_the_policy_that_sampled(tiny_folder: Path, tmp_path: Path) -> None:
    """Not to the one that the update begins with: of later updates it is not 1."""
    trained = learner(tiny_folder, tmp_path, "grpo", optimizer_steps_per_step=2)
    on_policy = []
    for group in groups(2):
        rows = trained.policy.recompute_behaviour(micro_batches([group], row_tokens=512, normalize_std=False))
        parts = torch.split(rows[0].behaviour_N, [len(completion) for completion in group.completions])
        on_policy.append(replace(group, behaviour=[part.tolist() for part in parts]))
    seen: list[float] = []
    apply = trained.policy.apply

    def watched(sums: Any, over: float) -> dict[str, float]:
        seen.append(sums["policy/mismatch_kl"])
        return apply(sums, over)

    trained.policy.apply = watched  # type: ignore[method-assign]
    trained.train(on_policy)
    assert seen[0] == pytest.approx(0.0, abs=1e-6) and seen[1] > 1e-4


def test_adamw_uses_the_rate_the_decay_rates_and_the_weight_decay_that_are_set(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the formula of arXiv 1711.05101, in float64, over three updates of the warm-up."""
    beta1, beta2, decay, lr = 0.7, 0.95, 0.3, 2e-3
    trained = make_policy(tiny_folder, betas=(beta1, beta2), weight_decay=decay, lr=lr, warmup_steps=5, grad_clip=1e9)
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
        wanted = wanted * (1 - rate * decay) - rate * moved
    torch.testing.assert_close(trained.masters[name].detach().double(), wanted, rtol=1e-5, atol=1e-7)
