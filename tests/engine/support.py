"""What tests of single and of several turns need: the slow way to generate, and a list of what was generated."""

from collections.abc import Sequence
from typing import Any

import torch

from shoal.engine.protocol import Completion, Sampling
from shoal.model.sampling import choose


@torch.no_grad()
def naive(model: Any, sequence: Sequence[int], seed: int, sampling: Sampling, start: int = 0) -> list[int]:
    """One turn, no cache, the whole sequence again for every token. It begins at position `start` of the completion."""
    tokens: list[int] = []
    for position in range(start, sampling.max_tokens):
        logits_1V = model(torch.tensor([[*sequence, *tokens]])).logits[:, -1]
        tokens += choose(logits_1V, [seed], [position], sampling.temperature)[0].tolist()
        if tokens[-1] in sampling.eos_ids:
            break
    return tokens


def with_prompts(
    prompts: Sequence[list[int]], groups: Sequence[Sequence[Completion]]
) -> list[tuple[list[int], Completion]]:
    """Every completion of every group, with its prompt."""
    return [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
