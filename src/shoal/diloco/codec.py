"""Encode vectors with 64 to 4 bits per number, and compensate rounding errors by error feedback.

    fp64, fp32, fp16, bf16   the number in that format, rounded to nearest even; fp16 is clamped to ±65,504
    int8                     per block of 1,024 numbers a float32 scale s = max|x| / 127, and round(x / s)
    int4                     per block of 512 numbers a scale max|x| / 7; two numbers in a byte, the first in its low half

Error feedback: a sender adds the rounding error of its last vector to the next one, e' = (x + e) − decode(encode(x + e)), so
errors do not accumulate. Sources: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019 (arXiv 1901.09847). The
meeting does the same with the average that it rounds, as in DoubleSqueeze (1905.05957).

Invariant: decoding depends on the bytes alone and gives the same bits everywhere. A non-finite number stays non-finite.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from shoal.errors import ShoalError

Kind = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4"]
KINDS = get_args(Kind)
FLOATS = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {  # how a file's header names these types
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
BLOCK, LARGEST = {"int8": 1024, "int4": 512}, {"int8": 127, "int4": 7}
FP16_MAX = 65504.0
HEADER_BYTES = 1024  # upper bound of safetensors' header
PART = 1 << 20  # numbers processed at a time, a multiple of every block size; keeps float64 copies small


class CodecError(ShoalError):
    """Bytes are not a vector of the expected kind and length."""


def parts(length: int) -> Iterator[slice]:
    """Split a vector into parts of PART numbers."""
    return (slice(at, min(at + PART, length)) for at in range(0, length, PART))


class Encoded:
    """An encoded vector, written and read part by part. No two parts share a block."""

    def __init__(self, kind: Kind, length: int, tensors: dict[str, Tensor]) -> None:
        self.kind, self.length, self.tensors = kind, length, tensors

    @classmethod
    def empty(cls, kind: Kind, length: int) -> "Encoded":
        layout = _layout(kind, length)
        return cls(kind, length, {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layout.items()})

    @classmethod
    def from_bytes(cls, data: bytes, kind: Kind, length: int) -> "Encoded":
        """Parse safetensors. Raise CodecError for any other bytes, before creating a tensor."""
        try:
            views = dict(deserialize(data))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise CodecError(f"not a safetensors file: {error}") from error
        layout = _layout(kind, length)
        result = {name: (view["dtype"], tuple(view["shape"])) for name, view in views.items()}
        if result != (expected := {name: (NAMES[dtype], shape) for name, (dtype, shape) in layout.items()}):
            raise CodecError(f"expected {length} numbers as {kind}, {expected}, not {str(result)[:200]}")
        read = {name: torch.frombuffer(views[name]["data"], dtype=dtype) for name, (dtype, _) in layout.items()}
        return cls(kind, length, read)

    def to_bytes(self) -> bytes:
        """Serialise as safetensors."""
        data: bytes = save(self.tensors)
        return data

    def put(self, part: slice, values: Tensor) -> None:
        """Encode `values` as `part`, one of `parts(length)`."""
        data = self.tensors["data"]
        if self.kind in FLOATS:
            if self.kind == "fp16":
                values = torch.where(values.isinf(), values, values.clamp(-FP16_MAX, FP16_MAX))
            data[part] = values.to(data.dtype)
            return
        largest = LARGEST[self.kind]
        blocks_BK = _blocks(values.float(), BLOCK[self.kind])
        scale_B1 = blocks_BK.abs().amax(1, keepdim=True).div_(largest)
        steps_BK = (blocks_BK / scale_B1.where(scale_B1 != 0, 1.0)).nan_to_num(0.0, largest, -largest)
        whole = steps_BK.round_().clamp_(-largest, largest).to(torch.int8).flatten()[: len(values)]
        if self.kind == "int4":
            data[_shrunk(part, 2)] = _packed(whole)
        else:
            data[part] = whole
        self.tensors["scale"][_shrunk(part, BLOCK[self.kind])] = scale_B1.flatten()

    def get(self, part: slice) -> Tensor:
        """Decode one of `parts(length)`: float64 for fp64, else float32."""
        data = self.tensors["data"]
        if self.kind in FLOATS:
            return data[part] if self.kind == "fp64" else data[part].float()
        count = part.stop - part.start
        whole = _unpacked(data[_shrunk(part, 2)], count) if self.kind == "int4" else data[part]
        scale_B = self.tensors["scale"][_shrunk(part, BLOCK[self.kind])]
        return (_blocks(whole.float(), BLOCK[self.kind]) * scale_B[:, None]).flatten()[:count]

    def norm(self) -> float:
        """Return the Euclidean norm. It is not finite if any number is not finite."""
        return math.sqrt(sum(float(self.get(part).double().square().sum()) for part in parts(self.length)))


def max_size_bytes(kind: Kind, length: int) -> int:
    """Return an upper bound for the encoded size of `length` numbers."""
    return HEADER_BYTES + sum(shape[0] * dtype.itemsize for dtype, shape in _layout(kind, length).values())


class ErrorFeedback:
    """Encode a sender's vectors. Add the rounding error of earlier vectors to each."""

    def __init__(self, left: Tensor) -> None:
        self.left = left  # float32; zeros at first

    def encode(self, values: Callable[[slice], Tensor], kind: Kind) -> Encoded:
        """Encode a vector. `values` computes one part of it."""
        encoded = Encoded.empty(kind, len(self.left))
        for part in parts(len(self.left)):
            exact = values(part).double() + self.left[part].double()
            encoded.put(part, exact)
            self.left[part] = (exact - encoded.get(part).double()).float()
        return encoded


def _layout(kind: Kind, length: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if kind in FLOATS:
        return {"data": (FLOATS[kind], (length,))}
    scale = (torch.float32, (-(-length // BLOCK[kind]),))
    if kind == "int4":
        return {"data": (torch.uint8, (-(-length // 2),)), "scale": scale}
    return {"data": (torch.int8, (length,)), "scale": scale}


def _shrunk(part: slice, by: int) -> slice:
    """Return the range of blocks of `by` numbers that a part covers."""
    return slice(part.start // by, -(-part.stop // by))


def _blocks(values: Tensor, block: int) -> Tensor:
    missing = -len(values) % block
    return torch.cat([values, values.new_zeros(missing)]).view(-1, block) if missing else values.view(-1, block)


def _packed(whole: Tensor) -> Tensor:
    """Pack two numbers from −7 to 7 into each byte, adding 8 to each."""
    halves_N2 = _blocks(whole.to(torch.uint8) + 8, 2)
    return (halves_N2[:, 0] & 15) | (halves_N2[:, 1] & 15) << 4


def _unpacked(data: Tensor, length: int) -> Tensor:
    return (torch.stack([data & 15, data >> 4], 1).flatten()[:length].to(torch.int8)) - 8
