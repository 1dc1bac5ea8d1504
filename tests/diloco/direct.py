"""A site in the same process as the meeting, and whole vectors as bytes, for tests."""

import torch
from torch import Tensor

from shoal.diloco.codec import Encoded, Kind, parts
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import SILENT, Figures, Greeting, RoundOutcome, Welcome
from shoal.diloco.remote import Remote


class Direct(Remote):
    """A site in the same process as the meeting: `Remote` without a network."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self.meeting, self.name = meeting, name

    def join(self, greeting: Greeting) -> Welcome:
        return self.meeting.join(self.name, greeting)

    def take(self) -> int:
        return self.meeting.take(self.name)

    def leave(self) -> None:
        self.meeting.leave(self.name)

    def deal(self, round: int) -> list[str]:
        return self.meeting.deal(self.name, round)

    def offer(self, round: int, digest: str, data: bytes, figures: Figures = SILENT) -> None:
        self.meeting.offer(self.name, round, digest, data, figures)
        if self.meeting.due():
            self.meeting.close()

    def outcome(self, round: int) -> tuple[RoundOutcome, bytes] | list[str]:
        if self.meeting.due():
            self.meeting.close()
        found = self.meeting.outcome(self.name, round)
        return self.meeting.waiting_for() if found is None else (found, self.meeting.average(round))

    def state(self, why: str) -> tuple[int, bytes]:
        self.meeting.heal(self.name, why)
        described, path = self.meeting.state()
        return described.round, path.read_bytes()


def encode(values: Tensor, kind: Kind) -> bytes:
    """A vector as safetensors."""
    encoded = Encoded.empty(kind, len(values))
    for part in parts(len(values)):
        encoded.put(part, values[part])
    return encoded.to_bytes()


def decode(data: bytes, kind: Kind, length: int) -> Tensor:
    """The vector, in float64 for fp64 and else in float32. Raise CodecError for any other bytes."""
    encoded = Encoded.from_bytes(data, kind, length)
    return torch.cat([encoded.get(part) for part in parts(length)])
