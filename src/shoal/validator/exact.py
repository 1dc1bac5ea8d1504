"""Exact replay: the checks for a worker that computes like this validator, where nothing is left to tolerance.

A worker of this validator's exactness class gets the same bits for every token (docs/trust.md). So its tokens, logprobs and
proofs are compared with `==`. They run after the checks with limits: what is beyond those is a lie, as ever; what is within
them and still differs is `inexact`, a soft rejection, because a flipped bit or an updated library can cause it.

Invariant: pure functions of a case; a submission passes only if every sampled token's margin, logprob and proof are equal.
Called by `judge` for cases with `exact` set, and by `shoal verify`.
"""

from itertools import zip_longest

import torch

from shoal import toploc
from shoal.protocol.messages import Reason, Replay
from shoal.store.rollouts import PROOF_CHUNK_TOKENS
from shoal.validator.case import Case, Outcome
from shoal.validator.checks import PASSED, Check, Rules, rejected


def exact_tokens(rules: Rules, case: Case) -> Outcome:
    """Is every token the one its seed yields, with a margin of exactly 0?"""
    margins_N = case.computed().margins_N
    differing = margins_N != 0
    if not bool(differing.any()):
        return PASSED
    found, first = int(differing.sum()), int(differing.nonzero()[0])
    return rejected(
        Reason.INEXACT,
        f"{found} of {len(margins_N)} tokens are not the argmax: {_place(case, first)} misses it by "
        f"{float(margins_N[first]):.3g} nats, where a machine of this class misses by 0",
        {"inexact_tokens": float(found)},
    )


def exact_logprobs(rules: Rules, case: Case) -> Outcome:
    """Is every logprob, as the file holds it, equal to the recomputed one?"""
    claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs], dtype=torch.float32)
    own_N = case.computed().logprobs_N.to(torch.float32)
    differing = claimed_N != own_N
    if not bool(differing.any()):
        return PASSED
    found, first = int(differing.sum()), int(differing.nonzero()[0])
    return rejected(
        Reason.INEXACT,
        f"{found} of {len(own_N)} logprobs differ: at {_place(case, first)} {float(claimed_N[first])!r} is claimed and "
        f"{float(own_N[first])!r} is computed",
        {"inexact_logprobs": float(found)},
    )


def exact_proofs(rules: Rules, case: Case) -> Outcome:
    """Is every proof, byte for byte, the one that the recomputed hidden states yield?"""
    prefill = case.computed()
    hiddens = list(torch.split(prefill.hidden_NH, prefill.lengths))
    own = toploc.build_many(hiddens, chunk_tokens=PROOF_CHUNK_TOKENS)
    pairs = [
        (number, chunk, claimed == proof)
        for number, (row, proofs) in enumerate(zip(case.rows, own, strict=True))
        for chunk, (claimed, proof) in enumerate(zip_longest(row.proofs, proofs))
    ]
    wrong = [(number, chunk) for number, chunk, equal in pairs if not equal]
    if not wrong:
        return PASSED
    number, chunk = wrong[0]
    return rejected(
        Reason.INEXACT,
        f"{len(wrong)} of {len(pairs)} proofs differ, first proof {chunk} of rollout {number}",
        {"inexact_proofs": float(len(wrong))},
    )


EXACT: list[Check] = [exact_tokens, exact_logprobs, exact_proofs]


def replay(case: Case) -> Replay:
    """How many tokens were compared without tolerance, and how many of them differ."""
    margins_N = case.computed().margins_N
    return Replay(tokens=len(margins_N), mismatched=int((margins_N != 0).sum()))


def _place(case: Case, index: int) -> str:
    """Where the sampled token is that has this index among all of the case's."""
    for number, length in enumerate(case.computed().lengths):
        if index < length:
            return f"sampled token {index} of rollout {number}"
        index -= length
    raise IndexError("beyond the case's tokens")
