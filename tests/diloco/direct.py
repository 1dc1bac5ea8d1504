"""A site in the same process as the meeting, for tests."""

from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import SILENT, Figures, Greeting, RoundOutcome, Welcome


class Direct:
    """A site in the same process as the meeting: `MeetingLink` without a network."""

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
