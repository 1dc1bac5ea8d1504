"""The log of a server, which strangers cannot fill.

Invariant: a request that is not HTTP is answered with 400 and not logged; aiohttp would log a traceback with what was sent,
hundreds of kilobytes for each. Nor is a reader that leaves before it has its answer. Errors of this program are logged.
Called by everything that starts a server: `server`, and the pool's coordinator.
"""

from __future__ import annotations

import logging

from aiohttp import ClientConnectionResetError
from aiohttp.http_exceptions import HttpProcessingError

THEIRS = (HttpProcessingError, ClientConnectionResetError)

LOG = logging.getLogger("shoal.serve")


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], THEIRS))


LOG.addFilter(_is_ours)
