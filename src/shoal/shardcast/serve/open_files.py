"""How many files, and so connections, this process may have open.

Invariant: a server accepts no more connections than it can open files for: each connection is one, and what it reads or
writes another. Else `accept` fails, and so does whatever else needs a file, such as a health check.
Called by `connections` and, when a role starts, by `cli`.
"""

from __future__ import annotations

import logging
import resource
import sys

RESERVED = 128  # for databases, logs, libraries, and connections that this process makes itself

log = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raise this process's limit of open files as far as the system lets it. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft == resource.RLIM_INFINITY:
        return soft if soft != resource.RLIM_INFINITY else sys.maxsize
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections(wanted: int) -> int:
    """At most `wanted`: as many connections as the limit of open files allows. Says so where that is fewer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if soft == resource.RLIM_INFINITY else max(1, (soft - RESERVED) // 2)
    if allowed < wanted < sys.maxsize:
        log.warning(
            "this process may open %d files, so it accepts %d connections of the %d it is set to; raise `ulimit -n`",
            soft,
            allowed,
            wanted,
        )
    return min(wanted, allowed)
