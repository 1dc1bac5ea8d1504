"""The same bytes as the public package's prefill-then-decode."""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.toploc import ChunkResult, build, to_base64, verify

PRIME = 65497
EXACT = ChunkResult(0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "prefill_at", "decode_at", "digest"),
    [
        (576, (), (5, 6), "d97772e1047edfb60777e7a18a1f7b3cb748efa73b60e946c7929507618102d6"),
        (  # indices that collide under the prime, in prefill and decode: both moduli are 65495
            4096,
            (9, 9 + PRIME, 9 + PRIME - 1, 131071),
            (9, 9 + PRIME, 9 + PRIME - 1, 131071),
            "39a26a23a38add3496f5791df439b594f4cec7c3c5da9bb93f6315320bcedefe",
        ),
    ],
)
def test_equals_what_the_public_package_wrote(
    tie_free: Callable[..., Tensor],
    width: int,
    prefill_at: tuple[int, ...],
    decode_at: tuple[int, ...],
    digest: str,
    dtype: torch.dtype,
) -> None:
    """build_proofs_bytes([prefill of 40 tokens, 37 single tokens], 32, 128) of toploc 0.1.6, the proofs joined.

    The bytes know nothing of the dtype: bfloat16 and float16 of the same bits have one digest.
    """
    prefill, whole, rest = (
        tie_free(40, width, prefill_at),
        tie_free(32, width, decode_at),
        tie_free(5, width, (1, 2, 3)),
    )
    hidden_TH = torch.cat([prefill, whole, rest]).view(torch.int16).view(dtype)
    proofs = [*build(hidden_TH[:40], chunk_tokens=40), *build(hidden_TH[40:])]
    assert hashlib.sha256(b"".join(proofs)).hexdigest() == digest
    assert verify(hidden_TH[40:], proofs[1:]) == [EXACT] * 2


def test_equals_the_public_packages_base64() -> None:
    """build_proofs_base64([two tokens, one token], 32, 4) of toploc 0.1.6 on these values."""
    rows = [
        [0.5, -3, 1.25, 0, 9, 0.125, -2, 0.75],
        [7, 1, -0.25, 4.5, 0, -6, 2.5, 0.625],
        [0.875, -5, 3.5, 0.375, 8, -10, 0.0625, 12],
    ]
    proofs = build(torch.tensor(rows), top_k=4, chunk_tokens=2)
    assert [to_base64(proof) for proof in proofs] == ["/9nI5pdSYE1URg==", "/9mke/vcMeruEQ=="]
