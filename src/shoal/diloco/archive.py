"""The folder of a meeting: the agreed state before each round, the averages, the record, and `meeting.json`.

    state-000007.safetensors      parameters and velocity before round 7       rounding-…   error feedback before that round
    average-000006.safetensors    the result of round 6                        rounds.jsonl one line per round, for people

Invariant: files are written atomically. `meeting.json` is written last and holds the SHA-256 of each file and of itself, so
it names only complete rounds, and a damaged file raises StateError. Only the newest KEPT rounds stay.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.diloco.agreed import Agreed, Shapes, StateError
from shoal.diloco.codec import ErrorFeedback
from shoal.diloco.messages import StateDescriptor
from shoal.files import append_lines, keep_lines, remove_leftovers, write_file, write_pieces

KEPT = 2  # rounds whose state and average are kept


class Archive:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        self.records = folder / "rounds.jsonl"
        self.sums: dict[str, str] = {}  # SHA-256 of the rounds' files, by name

    def load(self) -> dict[str, Any] | None:
        """Return the fields that `save` wrote; None in a new folder. Raise StateError."""
        path = self.folder / "meeting.json"
        if not path.exists():
            return None
        try:
            result: dict[str, Any] = json.loads(path.read_text())
            intact = result.pop("sha256", None) == _checksum(result)
        except ValueError:
            intact = False
        if not intact:
            raise _damaged(path)
        self.sums = result["files"]
        return result

    def save(self, fields: dict[str, Any]) -> None:
        fields = fields | {"files": self.sums}
        text = json.dumps(fields | {"sha256": _checksum(fields)}, indent=1)
        write_file(self.folder / "meeting.json", (text + "\n").encode())

    def drop_records(self, round: int) -> None:
        """Drop the lines of `round` and later rounds, which did not finish, and an incomplete last line."""
        keep_lines(self.records, lambda line: line["round"] < round)

    def record(self, figures: dict[str, Any]) -> None:
        append_lines(self.records, [figures])

    def average(self, round: int) -> bytes:
        """Return the bytes that `write_average` wrote. Raise StateError."""
        return self._checked("average", round).read_bytes()

    def write_average(self, round: int, data: bytes) -> None:
        self._write("average", round, [data])

    def state(self, round: int, shapes: Shapes) -> tuple[Agreed, ErrorFeedback]:
        """Return the state and the error feedback that `write_state` wrote. Raise StateError."""
        agreed = Agreed.take(load_file(self._checked("state", round)), shapes)
        return agreed, ErrorFeedback(load_file(self._checked("rounding", round))["left"])

    def write_state(self, round: int, agreed: Agreed, feedback: ErrorFeedback) -> None:
        self._write("rounding", round, pieces({"left": feedback.left}))
        self._write("state", round, pieces(agreed.tensors()))

    def describe(self, round: int) -> StateDescriptor:
        """Return the size and hash of a round's state file."""
        path = self.path("state", round)
        return StateDescriptor(round=round, sha256=self.sums[path.name], size_bytes=path.stat().st_size)

    def drop_old(self) -> None:
        for name in ("state", "rounding", "average"):
            for path in sorted(self.folder.glob(f"{name}-*.safetensors"))[:-KEPT]:
                path.unlink()
                self.sums.pop(path.name, None)

    def path(self, name: str, round: int) -> Path:
        return self.folder / f"{name}-{round:06d}.safetensors"

    def _write(self, name: str, round: int, data: Iterable[bytes | memoryview]) -> None:
        path, result = self.path(name, round), sha256()

        def hashed() -> Iterator[bytes | memoryview]:
            for piece in data:
                result.update(piece)
                yield piece

        write_pieces(path, hashed())
        self.sums[path.name] = result.hexdigest()

    def _checked(self, name: str, round: int) -> Path:
        path = self.path(name, round)
        with path.open("rb") as file:
            if file_digest(file, "sha256").hexdigest() != self.sums.get(path.name):
                raise _damaged(path)
        return path


def _checksum(fields: dict[str, Any]) -> str:
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path) -> StateError:
    return StateError(f"{path} is damaged: its checksum differs. Restore the meeting's folder from a backup")


def pieces(vectors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of these vectors without copying them: the header, then each vector."""
    entries, end_bytes = {}, 0
    for name, vector in vectors.items():
        begin_bytes, end_bytes = end_bytes, end_bytes + 4 * len(vector)
        entries[name] = {"dtype": "F32", "shape": [len(vector)], "data_offsets": [begin_bytes, end_bytes]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for vector in vectors.values():
        yield vector.float().contiguous().view(torch.uint8).numpy().data
