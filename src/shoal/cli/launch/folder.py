"""The folder of a run: which run it holds, and the lock on it while the run is going.

Invariant: at most one `shoal run` or `shoal clean` works in a folder at a time. Called by `swarm` and `clean`.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import UserError
from shoal.protocol.address import Address, AddressError

LOCK = ".running"


class FolderError(UserError):
    """A folder that holds no run, or a run that is still going."""


def stopped_run(folder: Path) -> tuple[str, str]:
    """(name, coordinator's address) of the run in `folder`. Raises FolderError."""
    try:
        address = Address.read(folder / "coordinator")
    except AddressError as error:
        raise FolderError(f"{folder} holds no run to resume or clean: no coordinator listened there") from error
    return address.run, address.url


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises FolderError if another one holds it."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderError(f"the run in {folder} is still going; stop it first") from error
        yield
