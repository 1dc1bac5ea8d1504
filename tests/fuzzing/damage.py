"""Ways to damage the input of code that reads untrusted bytes, shared by all fuzzers.

    proofs       TOPLOC proofs          files        rollout files
    requests     HTTP requests          coordinator  sends the HTTP requests to a coordinator

Each case reports its outcome to `note` in a few words. Invariant: the outcome starts with `CRASH` if and only if the fuzzed
code breaks a promise of its docstrings (raises another exception, accepts a forged proof, returns a NaN).
test_fuzz.py (a few thousand cases) and benchmarks/trust/fuzz.py (a million) use these fuzzers. The source of randomness
is an argument.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Note = Callable[[str], None]
CRASH = "CRASH"
NUMBERS = [-1, 0, 1, 2**15, 2**31 - 1, 2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 1e308, -0.5]
TEXTS = ["", "x", "\x00", "\ud800", "é" * 40, "0" * 64, "9" * 5_000]
VALUES: list[Any] = [*NUMBERS, None, True, *TEXTS, [], [[]], {}, {"a": 1}]


def crash(what: str, error: object, case: object) -> str:
    return f"{CRASH} {what}: {type(error).__name__} {error!s:.200} from {case!r:.600}"


def damaged(random: Random, data: bytes, others: Sequence[bytes] = (b"",)) -> bytes:
    """Return `data` with one kind of damage. One kind inserts a piece of `others`."""
    out, size = bytearray(data), max(len(data), 1)
    match random.randrange(8):
        case 0 | 1:
            for _ in range(random.randint(1, 6) if out else 0):
                out[random.randrange(size)] ^= 1 << random.randrange(8)
        case 2:
            del out[random.randrange(size) :]
        case 3:
            at = random.randrange(size)
            out[at : at + random.randint(0, 8)] = random.randbytes(random.randint(0, 8))
        case 4:
            at = random.randrange(size)
            del out[at : at + random.randint(1, 64)]
        case 5:
            other = random.choice(others)
            out[random.randrange(size) :] = other[random.randrange(len(other) + 1) :]
        case 6:
            at = random.randrange(size)
            out[at:at] = out[random.randrange(size) :][: random.randint(1, 64)]
        case _:
            out[:] = random.randbytes(random.choice([0, 1, 8, size, 2 * size]))
    return bytes(out)
