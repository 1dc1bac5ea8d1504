"""Named float32 vectors as a safetensors file, piece by piece: `safetensors.save` would copy all of them twice.

The format: https://huggingface.co/docs/safetensors. Called by `archive`.
"""

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def pieces(vectors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file's bytes: its header, then each vector from where it is."""
    entries, end_bytes = {}, 0
    for name, vector in vectors.items():
        begin_bytes, end_bytes = end_bytes, end_bytes + 4 * len(vector)
        entries[name] = {"dtype": "F32", "shape": [len(vector)], "data_offsets": [begin_bytes, end_bytes]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for vector in vectors.values():
        yield vector.float().contiguous().view(torch.uint8).numpy().data
