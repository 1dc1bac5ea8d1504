"""The folder of a meeting: what is agreed before each round, the averages, the record, and `meeting.json`.

    state-000007.safetensors      parameters and velocity before round 7       rounding-…   what rounding left over then
    average-000006.safetensors    the result of round 6                        rounds.jsonl one line per round, for people

Invariant: a file is whole under its name (`files`), and `meeting.json`, written last, names only rounds whose files are
there. The newest KEPT rounds stay. Called by `meeting`.
"""

import json
from hashlib import file_digest
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shoal.diloco.agreed import Agreed, StateError
from shoal.diloco.codec import ErrorFeedback
from shoal.diloco.fragments import Fragments
from shoal.diloco.messages import StateDescriptor
from shoal.diloco.vectors import pieces
from shoal.files import remove_leftovers, write_file, write_pieces

KEPT = 2  # rounds whose state and average stay


class Archive:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        self._described: StateDescriptor | None = None

    def held(self) -> dict[str, Any] | None:
        """What `hold` wrote; None in a new folder."""
        path = self.folder / "meeting.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def hold(self, held: dict[str, Any]) -> None:
        write_file(self.folder / "meeting.json", (json.dumps(held, indent=1) + "\n").encode())

    def record(self, figures: dict[str, Any]) -> None:
        with (self.folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")

    def average(self, round: int) -> bytes:
        return self.path("average", round).read_bytes()

    def write_average(self, round: int, data: bytes) -> None:
        write_file(self.path("average", round), data)

    def state(self, round: int, fragments: Fragments) -> tuple[Agreed, list[ErrorFeedback]]:
        """What `write_state` wrote. Raises StateError."""
        agreed = Agreed.take(_vectors(self.path("state", round)), fragments)
        left = _vectors(self.path("rounding", round))
        return agreed, [ErrorFeedback(left[str(number)]) for number in range(len(fragments))]

    def write_state(self, round: int, agreed: Agreed, feedback: list[ErrorFeedback]) -> None:
        left = {str(number): each.left for number, each in enumerate(feedback)}
        write_pieces(self.path("rounding", round), pieces(left))
        write_pieces(self.path("state", round), pieces(agreed.tensors()))

    def describe(self, run: str, round: int) -> StateDescriptor:
        """The size and hash of a round's state; hashed once, when the first site asks."""
        if self._described is None or self._described.round != round:
            path = self.path("state", round)
            with path.open("rb") as file:
                hashed = file_digest(file, "sha256").hexdigest()
            self._described = StateDescriptor(run=run, round=round, sha256=hashed, size_bytes=path.stat().st_size)
        return self._described

    def drop_old(self) -> None:
        for name in ("state", "rounding", "average"):
            for path in sorted(self.folder.glob(f"{name}-*.safetensors"))[:-KEPT]:
                path.unlink()

    def path(self, name: str, round: int) -> Path:
        return self.folder / f"{name}-{round:06d}.safetensors"


def _vectors(path: Path) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise StateError(f"{path} is damaged ({error}): restore the meeting's folder from a backup") from error
    return found
