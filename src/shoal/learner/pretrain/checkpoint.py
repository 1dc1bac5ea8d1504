"""A pretraining's checkpoint: one safetensors file with the parameters, AdamW's moments, and what the sites agreed on.

Invariant: training that goes on from a checkpoint equals training that was not stopped, bit for bit on the CPU. A file
appears whole or not at all, one whose bits changed since is refused, and nothing is unpickled.
Called by the trainer. Left out: writing while training goes on; several devices.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoal.diloco.agreed import digest
from shoal.errors import ShoalError
from shoal.files import remove_leftovers, write_file

KEPT = 2


class CheckpointError(ShoalError):
    """A checkpoint that cannot be read."""


@dataclass
class Progress:
    step: int = 0  # inner steps done
    updates: int = 0  # of AdamW since its moments were zero
    place: dict[str, int] | None = None  # of the next token
    round: int = 0  # of the sites' meeting, the next one
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)


def write(folder: Path, progress: Progress) -> Path:
    """Write a checkpoint, then remove older ones. Raises OSError if the disk refuses."""
    held = json.dumps(asdict(progress) | {"tensors": None})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in progress.tensors.items()}
    path = folder / f"step-{progress.step:08d}.safetensors"
    write_file(path, save(tensors, metadata={"progress": held, "sha256": _checksum(held, tensors)}))
    for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT]:
        old.unlink()
    return path


def read(folder: Path) -> Progress | None:
    """The newest checkpoint, None without one. Raises CheckpointError."""
    remove_leftovers(folder)
    found = sorted(folder.glob("step-*.safetensors"))
    if not found:
        return None
    try:
        with safe_open(found[-1], framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if metadata["sha256"] != _checksum(metadata["progress"], tensors):
            raise ValueError("its content is not what was written")
        held = json.loads(metadata["progress"])
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{found[-1]} is damaged ({error}): remove it to go on from an older one") from error
    return Progress(**held | {"tensors": tensors})


def _checksum(held: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the progress and of every tensor, each with its name, type and shape."""
    found = sha256(held.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)} {digest(tensor.flatten())}".encode())
    return found.hexdigest()
