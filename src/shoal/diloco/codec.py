"""Vectors of numbers as bytes of 64 to 4 bits each, and what the rounding left behind.

    fp64, fp32, fp16, bf16   the number in that format, to nearest even; fp16 is clamped to ±65,504
    int8                     per block of 1,024 numbers a float32 scale s = max|x| / 127, and round(x / s)
    int4                     per block of 512 numbers a scale max|x| / 7; two numbers in a byte, the first in its low half

Error feedback: a sender adds what rounding took from its last vector to the next one before it rounds again,
e' = (x + e) − decode(encode(x + e)). So over time what was decoded adds up to what was meant. Seide et al. 2014 (1-bit SGD);
Karimireddy et al. 2019 (arXiv 1901.09847); for the average as well, which the meeting rounds: DoubleSqueeze (1905.05957).

Invariant: `decode` depends on the bytes alone and gives the same bits everywhere. A number that is not finite stays so.
Called by `site` and `meeting`.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from shoal.diloco.outer import parts
from shoal.errors import ShoalError

Kind = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4"]
KINDS = get_args(Kind)
FLOATS = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK, LARGEST = {"int8": 1024, "int4": 512}, {"int8": 127, "int4": 7}
FP16_MAX = 65504.0
HEADER_BYTES = 1024  # most that safetensors adds


class CodecError(ShoalError):
    """Bytes that are not a vector of this kind and length."""


def encode(values: Tensor, kind: Kind) -> bytes:
    """A vector as safetensors."""
    data: bytes = save(_rounded(values, kind))
    return data


def _rounded(values: Tensor, kind: Kind) -> dict[str, Tensor]:
    if kind in FLOATS:
        if kind == "fp16":
            values = torch.where(values.isinf(), values, values.clamp(-FP16_MAX, FP16_MAX))
        return {"data": values.to(FLOATS[kind])}
    largest = LARGEST[kind]
    blocks_BK = _blocks(values.float(), BLOCK[kind])
    scale_B1 = blocks_BK.abs().amax(1, keepdim=True).div_(largest)
    steps_BK = (blocks_BK / scale_B1.where(scale_B1 != 0, 1.0)).nan_to_num(0.0, largest, -largest)
    whole = steps_BK.round_().clamp_(-largest, largest).to(torch.int8).flatten()[: len(values)]
    return {"data": _packed(whole) if kind == "int4" else whole, "scale": scale_B1.flatten()}


def decode(data: bytes, kind: Kind, length: int) -> Tensor:
    """The vector, in float64 for fp64 and else in float32. Raises CodecError for any other bytes."""
    try:
        tensors: dict[str, Tensor] = load(data)
    except SafetensorError as error:
        raise CodecError(f"not a safetensors file: {error}") from error
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if found != (wanted := _layout(kind, length)):
        raise CodecError(f"expected {length} numbers as {kind}, {wanted}, not {found}")
    return _restored(tensors, kind, length)


def _restored(tensors: Mapping[str, Tensor], kind: Kind, length: int) -> Tensor:
    values = tensors["data"]
    if kind in FLOATS:
        return values if kind == "fp64" else values.float()
    whole = _unpacked(values, length) if kind == "int4" else values
    return (_blocks(whole.float(), BLOCK[kind]) * tensors["scale"][:, None]).flatten()[:length]


def most_bytes(kind: Kind, length: int) -> int:
    """The size that no encoding of so many numbers exceeds."""
    return HEADER_BYTES + sum(shape[0] * dtype.itemsize for dtype, shape in _layout(kind, length).values())


class ErrorFeedback:
    """Rounds a sender's vectors, each with what rounding took from the ones before."""

    def __init__(self, left: Tensor) -> None:
        self.left = left  # float32; zeros at first

    def encode(self, values: Tensor, kind: Kind) -> bytes:
        return self.encode_parts((values[part] for part in parts(len(values))), kind)

    def encode_parts(self, values: Iterable[Tensor], kind: Kind) -> bytes:
        """The same, of a vector that never is in memory as a whole: it comes in `parts`."""
        left, found = torch.empty_like(self.left), []
        for part, own in zip(parts(len(left)), values, strict=True):
            meant = own.double() + self.left[part]
            found.append(_rounded(meant, kind))
            left[part] = meant - _restored(found[-1], kind, len(meant))
        self.left = left
        data: bytes = save({name: torch.cat([each[name] for each in found]) for name in found[0]})
        return data


def _layout(kind: Kind, length: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if kind in FLOATS:
        return {"data": (FLOATS[kind], (length,))}
    scale = (torch.float32, (-(-length // BLOCK[kind]),))
    if kind == "int4":
        return {"data": (torch.uint8, (-(-length // 2),)), "scale": scale}
    return {"data": (torch.int8, (length,)), "scale": scale}


def _blocks(values: Tensor, block: int) -> Tensor:
    missing = -len(values) % block
    return torch.cat([values, values.new_zeros(missing)]).view(-1, block) if missing else values.view(-1, block)


def _packed(whole: Tensor) -> Tensor:
    """Two numbers of −7 to 7 per byte, each plus 8."""
    halves_N2 = _blocks(whole.to(torch.uint8) + 8, 2)
    return (halves_N2[:, 0] & 15) | (halves_N2[:, 1] & 15) << 4


def _unpacked(data: Tensor, length: int) -> Tensor:
    return (torch.stack([data & 15, data >> 4], 1).flatten()[:length].to(torch.int8)) - 8
