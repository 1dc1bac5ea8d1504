"""Damages TOPLOC proofs. The damaged proofs are well-formed or malformed. Outcomes are described in `damage`."""

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from shoal.toploc import BFLOAT16, ProofError, build, from_base64, to_base64, verify, verify_many
from shoal.toploc.field import PRIME
from shoal.toploc.proof import parse

from .damage import Note, crash, damaged

TOP_K = 128
BATCH = 256  # well-formed proofs verified in one call


def fuzz_proofs(random: Random, cases: int, note: Note) -> None:
    """Parse damaged proofs one by one and verify the well-formed ones. Parse damaged texts.

    Also call `verify` with wrong numbers and types of proofs.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    shapes = [(32, 64), (32, 64), (32, 64), (5, 192), (1, 128), (32, 2304)]  # the last shape has indices beyond PRIME
    hiddens = [torch.randn(*shape, generator=generator).exp() for shape in shapes]
    hiddens[1] = hiddens[1].half()
    honest = [build(hidden_TH)[0] for hidden_TH in hiddens]
    batches: dict[bool, list[tuple[int, bytes]]] = {
        False: [],
        True: [],
    }  # the key says whether the hidden states are float16
    for _ in range(cases):
        which = random.choices(range(len(hiddens)), weights=[12, 6, 6, 6, 6, 1])[0]
        kind = random.randrange(16)
        if kind == 0:
            note(_text(random, honest[which]))
        elif kind == 1:
            note(_several(random, hiddens, honest, which))
        else:
            proof = _proof(random, honest[which], honest)
            try:
                parse([proof], top_k=TOP_K)
            except ProofError:
                note("proof refused")
            except Exception as error:  # noqa: BLE001  # any other exception is a finding
                note(crash("parse", error, proof))
            else:
                batches[which == 1].append((which, proof))
        for batch in batches.values():
            if len(batch) >= BATCH:
                _verify(hiddens, honest, batch, note)
    for batch in batches.values():
        _verify(hiddens, honest, batch, note)


def _proof(random: Random, proof: bytes, others: Sequence[bytes]) -> bytes:
    words = list(struct.unpack(f">{len(proof) // 2}H", proof))
    at = random.randrange(1, len(words))
    match random.randrange(10):
        case 0:
            return damaged(random, proof, others)
        case 1:
            return random.randbytes(random.choice([len(proof), len(proof), random.randrange(600)]))
        case 2:
            words[at] = random.randrange(PRIME, 1 << 16)
        case 3:
            words[0] = random.choice([0, 1, 576, 2**15, PRIME + 1, 2**16 - 1, random.randrange(1 << 16)])
        case 4:
            words[1:] = [random.randrange(PRIME)] + [0] * (len(words) - 2)  # a constant polynomial
        case 5:
            words[at:] = [0] * (len(words) - at)  # a polynomial of low degree
        case 6:
            words = [words[0], *(random.randrange(PRIME) for _ in words[1:])]
        case 7:
            words[at], words[-at] = words[-at], words[at]
        case 8:
            words[at] = random.randrange(PRIME)
        case _:
            other = random.choice(others)
            return proof[: 2 * at] + other[2 * at :]
    return struct.pack(f">{len(words)}H", *words)


def _verify(hiddens: Sequence[Tensor], honest: Sequence[bytes], batch: list[tuple[int, bytes]], note: Note) -> None:
    """Verify well-formed proofs and clear the batch. Only the honest polynomial may pass."""
    if not batch:
        return
    try:
        results = verify_many([hiddens[which] for which, _ in batch], [[proof] for _, proof in batch])
    except Exception as error:  # noqa: BLE001
        for _, proof in batch:
            note(crash("verify_many", error, proof))
        batch.clear()
        return
    for (which, proof), (result,) in zip(batch, results, strict=True):
        figures = (result.mantissa_error_mean, result.mantissa_error_median)
        if not 0 <= result.exponent_mismatches <= TOP_K or not all(figure >= 0 for figure in figures):
            note(crash("figures out of range", result, proof))
        elif not BFLOAT16.passes(result):
            note("proof fails")
        elif proof[4:] == honest[which][4:]:
            note("proof passes")
        else:
            note(crash("a forged proof passes", result, proof))
    batch.clear()


def _text(random: Random, proof: bytes) -> str:
    text = damaged(random, to_base64(proof).encode()).decode(random.choice(["latin-1", "ascii"]), "replace")
    try:
        if to_base64(from_base64(text)) != text:
            return crash("base64", ValueError("another text"), text)
    except ProofError:
        return "text refused"
    except Exception as error:  # noqa: BLE001
        return crash("from_base64", error, text)
    return "text read"


def _several(random: Random, hiddens: Sequence[Tensor], honest: Sequence[bytes], which: int) -> str:
    """Verify too few or too many proofs, values that are not bytes, or invalid hidden states and counts."""
    odd: list[Any] = [honest[which], b"", None, "x", 7, bytearray(honest[which]), memoryview(honest[which]), [b"x"]]
    proofs = [random.choice(odd) for _ in range(random.choice([0, 1, 1, 2, 3]))]
    hidden_TH = hiddens[which]
    inputs = [hidden_TH, hidden_TH, hidden_TH[:0], hidden_TH[0], hidden_TH.double(), hidden_TH / 0, hidden_TH[:, :1]]
    counts = {
        "chunk_tokens": random.choice([32, 32, 32, 1, 0, -1]),
        "top_k": random.choice([TOP_K, TOP_K, 1, 0, 10**6]),
    }
    try:
        verify(random.choice(inputs), proofs, **counts)
    except ProofError:
        return "proofs refused"
    except ValueError:
        return "caller at fault"
    except Exception as error:  # noqa: BLE001
        return crash("verify", error, (proofs, counts))
    return "proofs judged"
