"""The curriculum `pass_rate`: tasks that are solved about half of the time are drawn more often.

    p(task)      = (score + 1) / (rollouts + 2)          of the task's accepted rollouts so far; unseen: 1/2
    weight(task) = max(4 p (1 - p), 1/16)                1 for an unseen task, at least 1/16: every task keeps a chance

A group teaches by how much its rewards differ, and p (1 - p) is the variance of a reward of 0 or 1. Counts of a task are
halved when they exceed MEMORY rollouts, so that the rate follows the policy.

Rates come from the coordinator's pages. A page lists tasks with their newly accepted rollouts, and names the page before it
by its hash. An assignment names the newest page at its time.

A draw is rejection sampling. It first draws a task as a run without a curriculum would, then keeps it with probability
`weight(task)`, or else draws again from the same source. So tasks without rollouts need no entry, and each source keeps
its share.

Invariant: whole numbers and SHA-256 only, so all machines draw the same tasks from the same pages.
Left out: rates that differ by length target.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.protocol.messages import MILLION, CurriculumPage

PRIOR = 2  # rollouts, half of them right, that every task begins with
MEMORY = 64  # rollouts of a task that count; older ones fade
FLOOR = 16  # the least weight is one over this
MOST_DRAWS = 1_000  # a thousand tasks of the least weight are refused in a row once in 10^28 draws
KEPT = 8  # sets of rates, for assignments of different steps


class CurriculumError(ShoalError):
    """The pages of a curriculum are missing or not those that an assignment names."""


@dataclass(frozen=True)
class Rate:
    """What accepted rollouts of a task scored, in millionths."""

    rollouts: int
    score: int


Rates = Mapping[int, Rate]  # by task index; only tasks that were seen
Fetch = Callable[[str], CurriculumPage]


def no_pages(digest: str) -> CurriculumPage:
    raise CurriculumError(f"tasks are drawn by curriculum page {digest[:16]}, which only the run's coordinator has")


class Curriculum:
    """The rates after any page. `fetch` gets a page by its digest."""

    def __init__(self, fetch: Fetch = no_pages) -> None:
        self.fetch = fetch
        self._rates: dict[str, Rates] = {"": {}}  # by digest of the newest page, oldest first

    def rates(self, digest: str) -> Rates:
        """Raises CurriculumError if a page is not the one that its digest names."""
        pages = []
        at = digest
        while at not in self._rates:
            page = self.fetch(at)
            if page.digest() != at:
                raise CurriculumError(f"the coordinator sent another curriculum page than {at}; is it the run's own?")
            pages.append((at, page))
            at = page.previous
        rates = self._rates[at]
        for name, page in reversed(pages):
            rates = after(rates, page)
            self._keep(name, rates)
        return rates

    def _keep(self, digest: str, rates: Rates) -> None:
        self._rates[digest] = rates
        for old in list(self._rates)[1:-KEPT]:  # the first is that of no page
            del self._rates[old]


def after(rates: Rates, page: CurriculumPage) -> Rates:
    """Return the rates after one more page."""
    known = dict(rates)
    for task, rollouts, score in page.tasks:
        old = known.get(task, Rate(0, 0))
        known[task] = _faded(Rate(old.rollouts + rollouts * MILLION, old.score + score))
    return known


def draw(drawn: bytes, pick: Callable[[bytes], int], rates: Rates) -> int:
    """Return a task's index from 32 random bytes. `pick` proposes: bytes 16 to 24 draw the source, 0 to 8 its task."""
    index = 0
    for attempt in range(MOST_DRAWS):
        fresh = hashlib.sha256(drawn + attempt.to_bytes(4, "big")).digest()
        index = pick(fresh[:16] + drawn[16:24] + fresh[24:])
        if _is_accepted(rates.get(index), int.from_bytes(fresh[24:], "big")):
            break
    return index


def weight(rate: Rate | None) -> tuple[int, int]:
    """Return a task's weight as a fraction."""
    if rate is None:
        return 1, 1
    n, right = rate.rollouts + PRIOR * MILLION, rate.score + PRIOR * MILLION // 2
    return max(4 * FLOOR * right * (n - right), n * n), FLOOR * n * n


def _is_accepted(rate: Rate | None, random: int) -> bool:
    """`random` is below 2^64."""
    part, whole = weight(rate)
    return random * whole < part << 64


def _faded(rate: Rate) -> Rate:
    while rate.rollouts > MEMORY * MILLION:
        rate = Rate(rate.rollouts // 2, rate.score // 2)
    return rate
