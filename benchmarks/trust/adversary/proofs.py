"""Lies about finished work: forged logprobs, copied or replayed work, and forged proofs.

Where only the proofs lie, tokens and logprobs are honest. Paper: TOPLOC (arXiv 2501.16007).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from shoal import toploc
from shoal.engine.protocol import Completion
from shoal.protocol.messages import Assignment
from shoal.store.columns import PROOF_BYTES, PROOF_CHUNK_TOKENS
from shoal.tasks.derive import GroupPlan
from shoal.toploc.chunk import peaks
from shoal.toploc.field import PRIME

from .lab import Attack

UNASSIGNED = 10_000_000  # added to a submission's number, for work that was not assigned
TOP_K = PROOF_BYTES // 2 - 1


class ForgedLogprobs(Attack):
    """Claims half of each token's probability, which would double its importance ratio."""

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        return [
            [replace(c, logprobs=[logprob - math.log(2) for logprob in c.logprobs]) for c in group]
            for group in super().complete(prompts, plans)
        ]


class Copied(Attack):
    """Submits another worker's tokens and proofs with its own targets and seeds."""

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        return super().complete([self.prompt(plan) for plan in self.theirs], self.theirs)

    def plan(self, assignment: Assignment) -> list[GroupPlan]:
        own, self.identity = self.identity, self.lab.neighbour
        self.theirs = super().plan(assignment)
        self.identity = own
        return super().plan(assignment)


class Replayed(Attack):
    """Signs rollouts that it made for another task."""

    def submission(self, assignment: Assignment) -> bytes:
        plans = self.plan(assignment.model_copy(update={"number": assignment.number + UNASSIGNED}))
        rows = self.rollouts(plans, self.complete([self.prompt(plan) for plan in plans], plans))
        return self.sign(assignment, [self.prompt(plan) for plan in self.plan(assignment)], rows)


class OtherRowsProofs(Attack):
    """Gives every row the proofs of the next row."""

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        honest = super().prove(completions)
        flat = [proof for row in honest for proof in row]
        shift = len(honest[0])
        return regrouped(flat[shift:] + flat[:shift], honest)


class FlippedBit(Attack):
    """Flips one bit of one proof of the submission."""

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        honest = super().prove(completions)
        row = len(honest) // 2
        proof = bytearray(honest[row][0])
        proof[len(proof) // 2] ^= 1
        honest[row][0] = bytes(proof)
        return honest


class ConstantProofs(Attack):
    """Uses one constant polynomial, the median peak of the submission, as the proof of every chunk."""

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        result = peaks([c.hidden_TH for c in completions], chunk_tokens=PROOF_CHUNK_TOKENS, top_k=TOP_K)
        middle = int((result.bits_BK & 0x7FFF).median())
        proof = b"".join(word.to_bytes(2, "big") for word in (PRIME, middle, *[0] * (TOP_K - 1)))
        return [[proof] * count for count in result.chunks_per_sequence]


class TemplateProofs(Attack):
    """Builds every proof from the mean magnitude of each hidden dimension, learned once from other honest work."""

    template_H: torch.Tensor | None = None

    def submission(self, assignment: Assignment) -> bytes:
        if self.template_H is None:
            plans = self.plan(assignment.model_copy(update={"number": assignment.number + UNASSIGNED}))
            seen = self.complete([self.prompt(plan) for plan in plans], plans)
            hidden_NH = torch.cat([completion.hidden_TH for group in seen for completion in group]).float()
            self.template_H = hidden_NH.abs().mean(0)
        return super().submission(assignment)

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        assert self.template_H is not None
        hiddens = [self.template_H.expand(len(c.logprobs), -1).bfloat16() for c in completions]
        return toploc.build_many(hiddens, chunk_tokens=PROOF_CHUNK_TOKENS)


class RepeatedProof(Attack):
    """Uses the first chunk's proof for all chunks."""

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        honest = super().prove(completions)
        return [[honest[0][0]] * len(row) for row in honest]


class NullProofs(Attack):
    """Fills all proofs with zero bytes."""

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        return [[bytes(PROOF_BYTES)] * len(row) for row in super().prove(completions)]


class MissingProofs(Attack):
    """Omits the last proof of every row."""

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        return [row[:-1] for row in super().prove(completions)]


def regrouped(flat: Sequence[bytes], like: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """Return the proofs split into rows as long as those of `like`."""
    rest = iter(flat)
    return [[next(rest) for _ in row] for row in like]
