"""A fingerprint: the digest of what a model computes here for fixed inputs. Machines with equal ones compute alike.

Hidden states and logits of a packed tree whose branches cross the borders of attention's tiles, for tokens that follow from
a hash. It covers the weights too: a flipped bit in most of them changes it.

Invariant: it depends on weights, dtype and arithmetic alone; not on time, thread count or what else the process computes,
provided that the machine passed the self-test (`engine/selftest`).
Called by workers and validators for each version that they load: about the cost of 70 prefilled tokens. Left out: a proof
that the node computed it. A false one gains nothing (docs/trust.md).
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from shoal.model import head, numerics
from shoal.model.tree import Tree, forward_hidden, pack

PROMPT, BRANCHES = 5, (67, 3)  # tokens; attention's tiles are powers of two


def fixed_tokens(name: str, length: int, vocabulary: int) -> list[int]:
    """Token ids that follow from a name, the same everywhere."""
    digests = (hashlib.sha256(f"shoal/tokens\n{name}\n{number}".encode()).digest() for number in range(length))
    return [int.from_bytes(digest[:8], "big") % vocabulary for digest in digests]


def vocabulary_of(model: Any) -> int:
    """How many token ids the model knows."""
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """SHA-256 of hidden states and logits at 70 positions, as hex."""
    vocabulary = vocabulary_of(model)
    branches = [fixed_tokens(f"branch {number}", length, vocabulary) for number, length in enumerate(BRANCHES)]
    packed = pack([Tree(fixed_tokens("prompt", PROMPT, vocabulary), branches)]).to(model.device)
    hidden_NH = forward_hidden(model, packed)
    logits_NV = head.logits(model, hidden_NH)
    digest = hashlib.sha256(
        f"shoal/fingerprint/1\n{numerics.of(model)}\n{hidden_NH.dtype}\n{logits_NV.dtype}\n".encode()
    )
    for tensor in (hidden_NH, logits_NV):
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
