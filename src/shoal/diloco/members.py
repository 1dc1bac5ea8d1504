"""The sites of a meeting, and which share of the data each reads.

Waiting for a site backs off exponentially: after n consecutive rounds that waited in vain, the next one to wait is the
2^(n−1)-th from then. One offer in time resets that.
Invariant: a share is given once. If a site loses its place, the rest of its share is lost, and counted.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Any

from shoal.diloco.messages import Greeting, MeetingError

LONGEST_PAUSE = 64  # rounds between two that wait

log = logging.getLogger(__name__)


@dataclass
class SiteMember:
    expected: bool = False  # rounds wait for it
    since: int = 0  # the first round that waits for it
    failed: int = 0  # consecutive rounds that waited for it in vain
    share: int | None = None  # of the data
    accepted: int = -1  # the last round that took its offer


class SiteMembers:
    def __init__(self) -> None:
        self.named: dict[str, SiteMember] = {}  # all that ever joined
        self.next_share, self.lost_shares = 0, 0

    def __getitem__(self, name: str) -> SiteMember:
        """Raise MeetingError for a site that never joined."""
        if name not in self.named:
            raise MeetingError(f"{name} has not joined this meeting")
        return self.named[name]

    def join(self, name: str, greeting: Greeting, round: int) -> SiteMember:
        """Add a site, or take one back, while `round` is open. The next round waits for it."""
        member = self.named.setdefault(name, SiteMember())
        self.expect(name, round)
        if not greeting.placed and member.share is not None:
            log.warning("%s lost its place in the data: the rest of share %d is lost", name, member.share)
            self.lost_shares, member.share = self.lost_shares + 1, None
        return member

    def expect(self, name: str, round: int) -> None:
        """Wait for this site from the round after `round` on, or later if it failed recently."""
        member = self[name]
        if not member.expected:
            log.info("%s is here in round %d", name, round)
            member.expected, member.since = True, max(member.since, round + (round > 0))

    def fail(self, name: str, round: int) -> None:
        """Count a round that waited for it in vain."""
        member = self[name]
        member.failed += 1
        member.since = max(member.since, round + min(2 ** min(member.failed - 1, 32), LONGEST_PAUSE))

    def sharing(self, round: int, quorum: int) -> list[str]:
        """Return the sites that can share a round's work, sorted, without recently failed ones if the others suffice.

        Empty: too few sites.
        """
        here = self.expected()
        steady = sorted(name for name, each in here.items() if each.failed < 2 or each.since <= round)
        result = steady if len(steady) >= quorum else sorted(here)
        return result if len(result) >= quorum else []

    def take(self, name: str) -> int:
        """Give the site the next share of the data."""
        share = self[name].share = self.next_share
        self.next_share += 1
        return share

    def expected(self) -> dict[str, SiteMember]:
        return {name: each for name, each in self.named.items() if each.expected}

    def unfinished(self) -> int:
        """Count shares whose work is lost: the site is away, lost its place, or missed a round that it shared."""
        return self.lost_shares + sum(not each.expected and each.share is not None for each in self.named.values())

    def to_json(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        members = {name: asdict(member) for name, member in self.named.items()}
        return {"next_share": self.next_share, "lost_shares": self.lost_shares, "members": members}

    def restore(self, saved: dict[str, Any]) -> None:
        self.next_share, self.lost_shares = saved["next_share"], saved["lost_shares"]
        self.named = {name: SiteMember(**member) for name, member in saved["members"].items()}
