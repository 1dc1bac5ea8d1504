"""Download versions from untrusted servers into a folder. This file defines two errors: one server failed
(`SourceError`), and a whole fetch failed (`FetchError`)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import ShoalError


class SourceError(Exception):
    """A server failed to deliver; it may succeed later."""

    def __init__(self, url: str, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason = url, reason
        self.retry_after_s = retry_after_s  # from the Retry-After header


class NotHeld(SourceError):
    """The server does not have what was requested."""


class BadData(SourceError):
    """The server sent something that the learner did not publish."""


class FetchError(ShoalError):
    """A fetch failed. The message names the servers and the next step."""

    restart_helps = True  # other relays may be up after a restart


class RefusedVersionError(FetchError):
    """This machine does not take a version, whichever server has it. The message says why."""


class NoRouteError(FetchError):
    """No server offers the parent of a delta yet."""


def first_error(errors: ExceptionGroup) -> Exception:
    """Return the first FetchError in the group. If it holds none, return its first exception, which is a bug."""
    return next((error for error in errors.exceptions if isinstance(error, FetchError)), errors.exceptions[0])


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a FetchError that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(
                f"no space left for {folder}; free some space and fetch again (finished shards are kept)"
            ) from error
        raise FetchError(f"cannot write {folder}: {error}") from error
