"""Anything that is not a proof is refused with a ProofError that names its sequence and position."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.toploc import ProofError, build, build_many, from_base64, to_base64, verify, verify_many
from shoal.toploc.field import PRIME
from shoal.toploc.proof import MODULUS_MIN, parse, serialise

from .support import heavy_tailed


def words(modulus: int, *coefficients: int) -> bytes:
    return struct.pack(f">{1 + len(coefficients)}H", modulus, *coefficients)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (words(0, *[0] * 128), "null proof"),
        (b"", "0 bytes"),
        (words(PRIME, *[1] * 127), "256 bytes"),
        (words(PRIME, *[1] * 129), "260 bytes"),
        (words(PRIME, *[1] * 128) + b"\0", "259 bytes"),
        (words(PRIME + 1, *[1] * 128), "modulus 65498"),
        (words(1, *[1] * 128), "modulus 1 "),
        (words(576, *[1] * 128), "modulus 576"),
        (words(MODULUS_MIN - 1, *[1] * 128), "modulus 32768"),
        (words(PRIME, *[1] * 127, PRIME), "coefficient 65497"),
        (words(PRIME, 65535, *[1] * 127), "coefficient 65535"),
        ("text", "expected bytes, got str"),
        (None, "expected bytes, got NoneType"),
    ],
)
def test_the_error_names_a_malformed_proof(bad: bytes, reason: str) -> None:
    hiddens = [heavy_tailed(40, 192, seed) for seed in range(2)]
    proofs = build_many(hiddens)
    proofs[1][1] = bad
    with pytest.raises(ProofError, match=f"sequence 1, proof 1: .*{reason}") as caught:
        verify_many(hiddens, proofs)
    assert (caught.value.sequence, caught.value.proof) == (1, 1)


def test_missing_or_extra_proofs_are_refused() -> None:
    hidden_TH = heavy_tailed(70, 192)
    proofs = build(hidden_TH)
    for shown, reason in (
        (proofs[:2], "proof 2: missing: 2 proofs for 3 chunks"),
        ([], "proof 0: missing: 0 proofs"),
        ([*proofs, proofs[0]], "proof 3: extra: 4 proofs for 3 chunks"),
    ):
        with pytest.raises(ProofError, match=reason):
            verify(hidden_TH, shown)
    with pytest.raises(ValueError, match="2 sequences but proofs for 1"):
        verify_many([hidden_TH, hidden_TH], [proofs])


def test_no_tokens_is_an_error_and_not_an_empty_result() -> None:
    with pytest.raises(ProofError, match="no tokens"):
        verify(torch.zeros(0, 192), [])
    with pytest.raises(ProofError, match="no tokens"):
        build(torch.zeros(0, 192))
    with pytest.raises(ValueError, match="no sequences"):
        verify_many([], [])


def test_the_error_for_a_chunk_with_fewer_than_top_k_values_says_which_top_k_to_choose() -> None:
    with pytest.raises(ProofError, match="a chunk has only 64 values: choose a top_k of at most 64"):
        build(torch.ones(33, 64))
    proofs = build(torch.arange(33 * 64).float().reshape(33, 64), top_k=64)
    assert [len(proof) for proof in proofs] == [130, 130]


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (torch.full((32, 192), torch.nan), "not finite"),
        (torch.full((32, 192), 3.4e38), "not finite"),  # becomes infinite when rounded to bfloat16
        (torch.zeros(192), "expected"),
        (torch.zeros(32, 192, dtype=torch.float64), "float64"),
    ],
)
def test_invalid_hidden_states_are_not_a_proof_error(hidden: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        build(hidden)
    assert not isinstance(caught.value, ProofError)


def test_mixed_dtypes_and_counts_below_1_are_refused() -> None:
    hidden_TH = heavy_tailed(32, 192)
    with pytest.raises(ValueError, match="differ in dtype"):
        build_many([hidden_TH, hidden_TH.half()])
    with pytest.raises(ValueError, match="at least 1"):
        build(hidden_TH, top_k=0)
    with pytest.raises(ValueError, match="at least 1"):
        build(hidden_TH, chunk_tokens=0)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=20), st.binary(min_size=10, max_size=10)))
def test_parse_refuses_any_bytes_that_are_not_a_canonical_proof(data: bytes) -> None:
    try:
        modulus_B, coefficients_BK = parse([data], top_k=4)
    except ProofError as error:
        assert error.proof == 0
        return
    assert MODULUS_MIN <= int(modulus_B) <= PRIME
    assert int(coefficients_BK.max()) < PRIME
    assert serialise(modulus_B, coefficients_BK) == [data]


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_a_proof_is_unchanged_by_encoding_and_decoding_it_as_base64(data: bytes) -> None:
    assert from_base64(to_base64(data)) == data


@pytest.mark.parametrize(
    "text", ["AAA", "AAA=\n", " AAA=", "AAAA====", "AAB=", "A-_=", "AÄA=", "AA==AAAA", b"AAA=", None]
)
def test_non_canonical_base64_is_refused(text: str) -> None:
    with pytest.raises(ProofError):
        from_base64(text)
