"""An attacker that spends the tolerance: it knows the limits and chooses among the tokens that they allow.

At each position the attacker knows every token's score under the seed. The validator's limits accept a token whose score
is below the best score by less than the margin's limit, until the submission's budget is spent. The attacker tries every
such change, completes the rest honestly, and makes the cheapest changes that raise (or lower) the reward.
Its plan sets how much it spends. `PLANS` has a plan for each budget, and plans that try to evade the tests over many
submissions (`coordinator/trust.py`).
In an exactness class every such change has a margin above 0, so the attacker cannot make any.

Invariant: everything else is honest. Hidden states, logprobs and proofs are those of the claimed weights for the chosen
tokens. The attacker has no goal other than reward, changes at most one token of a completion, and leaves completions of
several turns as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.engine.protocol import Completion
from shoal.model.logprobs import logits
from shoal.model.sampling import gumbel, position_keys
from shoal.tasks.derive import GroupPlan

from .lab import Attack

SPENT = 0.9  # share of each limit
SEED_STEP = 0x9E3779B97F4A7C15  # the increment of splitmix64; adding it to a seed shifts positions by one
FAR = 4  # one token beyond FAR times the margin's limit gets a submission rejected


@dataclass(frozen=True)
class Plan:
    """How much of the tolerance is spent. Shares are of the limits in [validator]."""

    reach: float = SPENT  # share of sampling_margin by which a chosen token may miss
    mean: float = SPENT  # share of sampling_margin_mean, over the submission
    rate: float = math.inf  # share of the bound on changed tokens, `evidence.rates`
    far: int = 0  # tokens per submission that miss by more than sampling_margin (by at most 90 % of FAR times it)
    decoys: float = 0.0  # tokens changed without effect, per token changed for the reward


PLANS = {
    "90 % of the mean margin": Plan(),
    "two tokens beyond the margin": Plan(reach=0.0, far=2),
    "up to half of the margin": Plan(reach=1 / 2),
    "up to an eighth of the margin": Plan(reach=1 / 8),
    "an eighth, a quarter of the bound's rate": Plan(reach=1 / 8, rate=1 / 4),
    "an eighth, a quarter of the rate, as many decoys": Plan(reach=1 / 8, rate=1 / 4, decoys=1.0),
}


@dataclass(frozen=True)
class Swap:
    """A replacement token that the limits allow at one position of one completion."""

    group: int
    number: int
    position: int
    token: int
    margin: float  # nats


@dataclass(frozen=True)
class Tried:
    """A swap, the completion that the seed yields after it, and the change of its reward."""

    swap: Swap
    completion: Completion
    before: float  # the reward without the swap
    gain: float

    @property
    def place(self) -> tuple[int, int]:
        return self.swap.group, self.swap.number


class SpendsTolerance(Attack):
    """Swaps tokens within 90 % of the limits where that raises the reward."""

    direction = 1.0  # 1: raise the reward; -1: lower it
    spending = PLANS["90 % of the mean margin"]

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        groups = super().complete(prompts, plans)
        swaps, movable = self.swaps(prompts, plans, groups)
        farthest = max(self.spending.reach, SPENT * FAR if self.spending.far else 0.0)
        within = [swap for swap in swaps if swap.margin <= farthest * self.config.validator.sampling_margin]
        tried = self.tried(prompts, plans, groups, within)
        for one in self.chosen(tried, sum(len(c.logprobs) for group in groups for c in group), movable):
            groups[one.swap.group][one.swap.number] = one.completion
        return self.scored(prompts, groups)

    @torch.inference_mode()
    def swaps(
        self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan], groups: Sequence[Sequence[Completion]]
    ) -> tuple[list[Swap], float]:
        """Return the second-best token of every position, in order of margin, and the exposure (the sum of 1 - P(token))."""
        result, movable = [], 0.0
        for g, group in enumerate(groups):
            for number, completion in enumerate(group):
                if completion.turns:
                    continue
                hidden_TH = completion.hidden_TH.to(self.model.device, self.model.dtype)
                scaled_TV = logits(self.model, hidden_TH).float().cpu() / self.sampling.temperature
                movable += sum(1.0 - math.exp(logprob) for logprob in completion.logprobs)
                count, vocabulary = scaled_TV.shape
                keys_T = position_keys([plans[g].seeds[number]] * count, range(count))
                ids_V = torch.arange(vocabulary).numpy()
                scores_TV = scaled_TV + gumbel(keys_T[:, None], ids_V[None, :])
                best_T2, token_T2 = scores_TV.topk(2, dim=-1)
                for position, (pair, tokens) in enumerate(zip(best_T2.tolist(), token_T2.tolist(), strict=True)):
                    other = tokens[1] if tokens[0] == completion.tokens[position] else tokens[0]
                    result.append(Swap(g, number, position, other, pair[0] - pair[1]))
        return sorted(result, key=lambda swap: swap.margin), movable

    def tried(
        self,
        prompts: Sequence[Sequence[int]],
        plans: Sequence[GroupPlan],
        groups: Sequence[Sequence[Completion]],
        swaps: Sequence[Swap],
    ) -> list[Tried]:
        """Return every swap with the rest of its completion and its gain, in the same order."""
        old = [groups[swap.group][swap.number] for swap in swaps]
        new: list[Completion | None] = [None] * len(swaps)
        for position in sorted({swap.position for swap in swaps}):
            here = [n for n, swap in enumerate(swaps) if swap.position == position]
            texts = self.continued(prompts, plans, [swaps[n] for n in here], [old[n] for n in here])
            for n, tokens in zip(here, texts, strict=True):
                new[n] = replace(old[n], tokens=tokens, logprobs=[0.0] * len(tokens))
        done = [completion for completion in new if completion is not None]
        before = self.rewards([(plans[swap.group], one) for swap, one in zip(swaps, old, strict=True)])
        after = self.rewards([(plans[swap.group], one) for swap, one in zip(swaps, done, strict=True)])
        return [
            Tried(swap, completion, reward, changed - reward)
            for swap, completion, reward, changed in zip(swaps, done, before, after, strict=True)
        ]

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        plans: Sequence[GroupPlan],
        swaps: Sequence[Swap],
        old: Sequence[Completion],
    ) -> list[list[int]]:
        """Return the tokens of each completion: those before its swap, the swapped token, and those that the seed yields
        afterwards. All swaps are at the same position."""
        kept = [[*one.tokens[: swap.position], swap.token] for swap, one in zip(swaps, old, strict=True)]
        room = self.sampling.max_tokens - len(kept[0])
        going = [n for n, swap in enumerate(swaps) if room and swap.token not in self.sampling.eos_ids]
        if going:
            rests = self.engine.generate(
                [[*prompts[swaps[n].group], *kept[n]] for n in going],
                [[(plans[swaps[n].group].seeds[swaps[n].number] + len(kept[n]) * SEED_STEP) % 2**64] for n in going],
                replace(self.sampling, max_tokens=room),
                None,
            )
            for n, [rest] in zip(going, rests, strict=True):
                kept[n] = kept[n] + rest.tokens
        return kept

    def chosen(self, tried: Sequence[Tried], tokens: int, movable: float) -> list[Tried]:
        """Return the swaps within the plan's budget, at most one for each completion. Swaps of smaller margin go first."""
        plan, limits = self.spending, self.config.validator
        nats = plan.mean * limits.sampling_margin_mean * tokens
        near = plan.rate * self.config.evidence.rates[0] * movable / (1.0 + plan.decoys)
        far = float(plan.far)
        taken: dict[tuple[int, int], Tried] = {}
        for one in tried:
            beyond = one.swap.margin > limits.sampling_margin
            reached = beyond or one.swap.margin <= plan.reach * limits.sampling_margin
            useful = reached and self.direction * one.gain > 0 and one.place not in taken
            cost = 0.0 if beyond else one.swap.margin  # the mean leaves out tokens beyond the margin
            if useful and cost <= nats and (far if beyond else near) >= 1:
                far, near, nats = far - beyond, near - (not beyond), nats - cost
                taken[one.place] = one
        # Decoys hide that changes and rewards are correlated. So they go first into the completions whose rewards help
        # the attacker least.
        decoys = round(plan.decoys * len(taken))
        for one in sorted(tried, key=lambda one: (self.direction * one.before, one.swap.margin)):
            if (
                decoys
                and one.gain == 0
                and one.place not in taken
                and one.swap.margin <= min(nats, limits.sampling_margin)
            ):
                decoys, nats = decoys - 1, nats - one.swap.margin
                taken[one.place] = one
        return list(taken.values())


class SpendsToleranceDown(SpendsTolerance):
    """Swaps tokens within 90 % of the limits where that lowers the reward."""

    direction = -1.0
