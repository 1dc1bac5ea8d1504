"""One forward pass of the claimed version over several submissions at once. All expensive checks read its results.

The groups of all submissions are packed into rows; each group's prompt is computed once.
Invariant: except for rounding, a submission's results do not depend on the other submissions that share its rows.
Paper: TOPLOC (arXiv 2501.16007), which shows that a prefill checks many tokens in the time that decoding a few takes.

The results include evidence on the distribution from which the tokens were sampled. This evidence does not use the
seeds. For each of a few other distributions q, the product over tokens of q(token) / p(token) is a martingale of mean 1
under honest sampling from p. The average of these products is a martingale of mean 1 too. By Ville's inequality, the
average of an honest submission exceeds e^x with probability at most e^-x, for any length and any p. So the limit on
this average, in `checks`, needs no calibration and no normal approximation.

    sharper      p^2, renormalised: detects half the temperature, greedy decoding, beam search, best-of-n
    flatter      p^(1/2), renormalised: detects twice the temperature
    truncated    0.99 * (p above 2 % of the largest, renormalised) + 0.01 * p: detects top-k, top-p, min-p
    foreign      0.9 * p + 0.1 * uniform: detects tokens that this model finds very unlikely, such as another model's

Sources: betting against a hypothesis, Shafer 2021 (JRSS A 184:407); token-probability shape as evidence, INTELLECT-2
(arXiv 2505.07291, section 2.3).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.model.logprobs import likelihoods, logits, token_logprobs
from shoal.model.sampling import replay_margins
from shoal.model.tree import Tree, assign_rows, forward_hidden, pack, split
from shoal.model.turns import model_positions
from shoal.store.rollouts import Rollout
from shoal.validator.case import Case, Prefill

VOCABULARY_ROWS = 512  # number of tokens whose logits are computed in one pass over the output head's weights
CACHED_ROWS = 16  # number of tokens scored together, so that their logits, a few MB, stay in the CPU's cache
ALTERNATIVES = ("sharper", "flatter", "truncated", "foreign")
TRUNCATED_BELOW = 0.02


@torch.inference_mode()
def prefill(model: Any, cases: Sequence[Case], *, temperature: float, row_tokens: int) -> list[Prefill]:
    """Return the results for each case. All cases must claim the version that `model` holds."""
    hidden_NH = hidden_states(model, cases, row_tokens)
    sampled = [[model_positions(row.turns, len(row.tokens)) for row in case.rows] for case in cases]
    pairs = [
        (row, position)
        for case, by_row in zip(cases, sampled, strict=True)
        for row, row_positions in zip(case.rows, by_row, strict=True)
        for position in row_positions
    ]
    tokens_N = torch.tensor([row.tokens[position] for row, position in pairs], device=hidden_NH.device)
    seeds, positions = [row.seed for row, _ in pairs], [position for _, position in pairs]
    logprobs, margins, evidence = [], [], []
    for start in range(0, len(tokens_N), CACHED_ROWS):
        within = start % VOCABULARY_ROWS
        if within == 0:
            logits_WV = logits(model, hidden_NH[start : start + VOCABULARY_ROWS])
        span = slice(start, start + CACHED_ROWS)
        scaled_CV = logits_WV[within : within + CACHED_ROWS].float().div_(temperature)
        margins.append(replay_margins(scaled_CV, tokens_N[span], seeds[span], positions[span]))
        logp_C, evidence_CA = token_evidence(scaled_CV, tokens_N[span])
        logprobs.append(logp_C)
        evidence.append(evidence_CA)
    lengths = [[len(row_positions) for row_positions in by_row] for by_row in sampled]
    per_case = zip(
        *(
            torch.split(tensor.cpu(), [sum(row_lengths) for row_lengths in lengths])
            for tensor in (hidden_NH.to(torch.bfloat16), torch.cat(logprobs), torch.cat(margins), torch.cat(evidence))
        ),
        strict=True,
    )
    return [
        Prefill(hidden, logprobs_N, margins_N, evidence_NA, row_lengths)
        for row_lengths, (hidden, logprobs_N, margins_N, evidence_NA) in zip(lengths, per_case, strict=True)
    ]


def hidden_states(model: Any, cases: Sequence[Case], row_tokens: int) -> Tensor:
    """Return hidden_NH: the final hidden states of every token that the model wrote, in order."""
    longest = max(len(case.prompts[row.group]) + len(row.tokens) for case in cases for row in case.rows)
    width = max(row_tokens, longest)  # even the longest rollout must fit
    trees = [
        part
        for case in cases
        for group, prompt in enumerate(case.prompts)
        if any(row.group == group for row in case.rows)  # a spot check may contain no rollout of the group
        for part in split(_tree(prompt, [row for row in case.rows if row.group == group]), width)
    ]
    device = next(model.parameters()).device
    return torch.cat(
        [
            forward_hidden(model, pack([trees[i] for i in row]).to(device))
            for row in assign_rows([tree.n_tokens for tree in trees], width)
        ]
    )


def _tree(prompt: Sequence[int], rows: Sequence[Rollout]) -> Tree:
    return Tree(prompt, [row.tokens for row in rows], [row.turns for row in rows])


def token_evidence(scaled_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs_N of the tokens, and evidence_NA = log q(token) - log p(token) for each alternative q, in nats.

    All tensors are float32. scaled_NV: logits divided by the temperature.
    """
    relative = likelihoods(scaled_NV)
    likelihood_NV, total_N, top_N1 = relative
    logp_N = token_logprobs(scaled_NV, tokens_N, relative)
    roots_N = likelihood_NV.sqrt().sum(-1)
    squares_N = torch.linalg.vecdot(likelihood_NV, likelihood_NV)
    kept_NV = F.threshold(likelihood_NV, TRUNCATED_BELOW, 0.0, inplace=True)
    kept_N = kept_NV.sum(-1)
    inside_N = kept_NV.gather(-1, tokens_N[:, None])[:, 0] > 0
    chosen_N = (scaled_NV.gather(-1, tokens_N[:, None]) - top_N1)[:, 0]
    uniform_N = torch.exp(-logp_N - math.log(scaled_NV.shape[-1]))
    evidence = [
        2 * chosen_N - squares_N.log() - logp_N,
        chosen_N / 2 - roots_N.log() - logp_N,
        torch.log(0.99 * inside_N * (total_N / kept_N) + 0.01),
        torch.log(0.9 + 0.1 * uniform_N),
    ]
    return logp_N, torch.stack(evidence, dim=-1)


def submission_evidence(evidence_NA: Tensor) -> float:
    """Return the evidence from all tokens, in nats. For honest work it exceeds x with probability at most e^-x."""
    return float(torch.logsumexp(evidence_NA.double().sum(0), 0)) - math.log(evidence_NA.shape[-1])
