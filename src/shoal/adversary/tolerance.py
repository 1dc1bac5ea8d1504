"""Spending the tolerance: an attacker that has read the limits and chooses among the tokens that they allow.

At each position it knows every token's score under its seed. A token whose score misses the winner's by less than the
margin's limit, while the submission's budget lasts, passes the checks with limits. It tries each such change, completes
the rest honestly and keeps the change if the reward rises (or falls).
In an exactness class every such token has a margin above 0: nothing is left to choose.

Invariant: everything else is honest: states, logprobs and proofs are those of the claimed weights for the chosen tokens.
Called by `attacks`. Left out: choosing for anything else than reward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.adversary.lab import Attack
from shoal.engine.protocol import Completion
from shoal.model.sampling import gumbel_noise, position_keys
from shoal.tasks.derive import GroupPlan

SPENT = 0.9  # of each limit


@dataclass(frozen=True)
class Swap:
    """Another token that the limits allow at one position of one completion."""

    group: int
    number: int
    position: int
    token: int
    margin: float  # nats


class SpendsTolerance(Attack):
    """Swaps tokens within 90 % of the limits where that raises the reward."""

    direction = 1.0  # of the reward

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        groups = super().complete(prompts, plans)
        limits = self.config.validator
        tokens = sum(len(completion.logprobs) for group in groups for completion in group)
        left = SPENT * limits.sampling_margin_mean * tokens  # nats, summed over the submission
        for swap in self.swaps(plans, groups):
            if swap.margin > left or swap.margin > SPENT * limits.sampling_margin:
                continue
            old = groups[swap.group][swap.number]
            if swap.position >= len(old.tokens):
                continue
            new = self.continued(prompts[swap.group], plans[swap.group], swap, old)
            plan = plans[swap.group]
            gained = self.rewards([(plan, new)])[0] - self.rewards([(plan, old)])[0]
            if self.direction * gained > 0:
                groups[swap.group][swap.number] = new
                left -= swap.margin
        return self.scored(prompts, groups)

    @torch.inference_mode()
    def swaps(self, plans: Sequence[GroupPlan], groups: Sequence[Sequence[Completion]]) -> list[Swap]:
        """The second-best token of every position, nearest first. Single-turn completions only."""
        found = []
        for g, group in enumerate(groups):
            for number, completion in enumerate(group):
                if completion.turns:
                    continue
                hidden_TH = completion.hidden_TH.to(self.model.device, self.model.dtype)
                scaled_TV = self.model.lm_head(hidden_TH).float().cpu() / self.sampling.temperature
                count, vocabulary = scaled_TV.shape
                keys_T = position_keys([plans[g].seeds[number]] * count, range(count))
                ids_V = torch.arange(vocabulary).numpy()
                scores_TV = scaled_TV + gumbel_noise(keys_T[:, None], ids_V[None, :])
                best_T2, token_T2 = scores_TV.topk(2, dim=-1)
                for position, (pair, tokens) in enumerate(zip(best_T2.tolist(), token_T2.tolist(), strict=True)):
                    other = tokens[1] if tokens[0] == completion.tokens[position] else tokens[0]
                    found.append(Swap(g, number, position, other, pair[0] - pair[1]))
        return sorted(found, key=lambda swap: swap.margin)

    def continued(self, prompt: Sequence[int], plan: GroupPlan, swap: Swap, old: Completion) -> Completion:
        """The completion with this token, and what the seed yields after it."""
        kept = [*old.tokens[: swap.position], swap.token]
        room = self.sampling.max_tokens - len(kept)
        if swap.token in self.sampling.eos_ids or not room:
            return replace(old, tokens=kept, logprobs=[0.0] * len(kept))
        seed = shifted(plan.seeds[swap.number], len(kept))
        sampling = replace(self.sampling, max_tokens=room)
        [[rest]] = self.engine.generate([[*prompt, *kept]], [[seed]], sampling, None)
        tokens = kept + rest.tokens
        return replace(old, tokens=tokens, logprobs=[0.0] * len(tokens))


class SpendsToleranceDown(SpendsTolerance):
    """Swaps tokens within 90 % of the limits where that lowers the reward."""

    direction = -1.0


def shifted(seed: int, positions: int) -> int:
    """The seed whose noise at position p is that of `seed` at p + positions."""
    return (seed + positions * 0x9E3779B97F4A7C15) % 2**64
