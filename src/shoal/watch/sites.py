"""The sites at which one model is trained: who has a part in the newest version, and how each spends its time and traffic.

Invariant: what a site says of itself is told, and nothing is decided by it. Called by the screen, `shoal pool status` and
the dashboard. The figures come with a step's metrics (`sites/NAME/...`, docs/metrics.md) or from a meeting's status.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from rich.table import Table
from rich.text import Text

from shoal.watch.figures import NONE, clean, count, number, percent, ratio

RECENT = 64  # newest steps that are searched for sites
KEPT = re.compile(r"^sites/(.+)/kept$")
FIGURES = ("loss", "computed_s", "waited_s", "synced_s", "sent_bytes", "received_bytes")


@dataclass(frozen=True)
class SiteRow:
    name: str
    state: str
    well: bool  # nothing is wrong with it
    loss: float | None = None  # of its last update
    computed_s: float = 0.0  # seconds and bytes since it started
    waited_s: float = 0.0
    synced_s: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    def share(self, seconds: float) -> float | None:
        """Of the time that it accounts for."""
        return ratio(seconds, self.computed_s + self.waited_s + self.synced_s)


def sites_of(metrics: Sequence[Mapping[str, float]]) -> list[SiteRow]:
    """Each site of a run as the newest step tells of it that had to do with it, by name."""
    found: dict[str, SiteRow] = {}
    newest = metrics[-1].get("step") if metrics else None
    for step in reversed(metrics[-RECENT:]):
        names = [KEPT.match(key) for key in step] if "sites/kept" in step else []
        for name in (match[1] for match in names if match and match[1] not in found):
            found[name] = _row(name, step, newest=step.get("step") == newest)
    return [found[name] for name in sorted(found)]


def _row(name: str, step: Mapping[str, float], *, newest: bool) -> SiteRow:
    kept = bool(step[f"sites/{name}/kept"])
    state = "counts" if kept else "left out" if step.get(f"sites/{name}/left_out") else "missing"
    if not newest:
        state = f"away since step {step.get('step', 0.0) + 1 + kept:.0f}"
    told = {key: step.get(f"sites/{name}/{key}") for key in FIGURES}
    known = {key: value for key, value in told.items() if value is not None and isfinite(value)}
    return SiteRow(clean(name), state, newest and kept, **known)


def summary(sites: Sequence[SiteRow]) -> list[str]:
    """`1 of 2 count`, `site-1 away since step 12`."""
    wrong = [f"{site.name} {site.state}" for site in sites if not site.well]
    return [f"{len(sites) - len(wrong)} of {len(sites)} count", *wrong]


def sites_table(sites: Sequence[SiteRow], width: int) -> Table:
    table = Table(box=None, expand=True, padding=(0, 2 if width >= 90 else 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("site", no_wrap=True)
    table.add_column("state", no_wrap=True, ratio=1)
    for title in ("loss", "computing", "waiting", "syncing", "sent", "received"):
        table.add_column(title, no_wrap=True, justify="right")
    for site in sites:
        times = (percent(site.share(each), 0) for each in (site.computed_s, site.waited_s, site.synced_s))
        sizes = (f"{count(each)}B" if each else NONE for each in (site.sent_bytes, site.received_bytes))
        state = Text(site.state, style="" if site.well else "yellow")
        table.add_row(Text(site.name), state, number(site.loss), *times, *sizes)
    return table
