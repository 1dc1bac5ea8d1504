"""The legs of a run: from each start or resumption to its end. What `shoal run` measures itself, kept in `legs.json`.

Invariant: the file holds every leg so far, the running one up to a few seconds ago, so a resumed run's summary covers all.
The time that a run took is theirs, on every screen, page and report. Called by `swarm` and the dashboard.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.files import write_file

FILE = "legs.json"
ENDED_S = 60.0  # a leg that was kept longer ago than this has ended


@dataclass
class Leg:
    wall_s: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)  # by process
    peak_together_bytes: int = 0
    estimated_s: float = 0.0  # before it started; 0: not estimated
    estimated_bytes: float = 0.0


def read_legs(folder: Path) -> list[Leg]:
    """The legs of the run in `folder`; none for a new run."""
    path = folder / FILE
    return [Leg(**leg) for leg in json.loads(path.read_text())] if path.exists() else []


def wall_s(folder: Path, now_s: float, *, running: bool) -> float | None:
    """Seconds that the run in `folder` has taken, between its legs none; None where no `shoal run` measured any."""
    path = folder / FILE
    if not path.exists():
        return None
    since_s = now_s - path.stat().st_mtime  # of the running leg, since it was last kept
    return total(read_legs(folder)).wall_s + (since_s if running and 0 < since_s < ENDED_S else 0.0)


def write_legs(folder: Path, legs: list[Leg]) -> None:
    write_file(folder / FILE, (json.dumps([asdict(leg) for leg in legs]) + "\n").encode())


def total(legs: list[Leg]) -> Leg:
    """All legs as one: seconds and restarts are summed, peaks are the highest of any leg."""
    restarts: Counter[str] = Counter()
    peaks: Counter[str] = Counter()
    for leg in legs:
        restarts.update(leg.restarts)
        peaks |= Counter(leg.peak_rss_bytes)
    names = [name for leg in legs for name in leg.restarts]
    return Leg(
        wall_s=sum(leg.wall_s for leg in legs),
        restarts={name: restarts[name] for name in names},
        peak_rss_bytes=dict(peaks),
        peak_together_bytes=max((leg.peak_together_bytes for leg in legs), default=0),
    )
