"""The errors that users see, checks that raise them, a rule for whether a restart may help, and a filter that makes text
safe to print.

`cli` prints a `ShoalError` or an `OSError` as one line. Any other exception is a bug and keeps its traceback.
"""

import errno
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

EXTRAS = {"s3": "obstore", "postgres": "psycopg", "evm": "web3", "tensorboard": "tensorboard", "wandb": "wandb"}
LASTING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EADDRINUSE, errno.EADDRNOTAVAIL}
)  # OSErrors that a restart does not fix: a full or read-only disk, no permission, an address in use or not available


class ShoalError(Exception):
    """An error whose message names what failed and what to do next.

    `restart_helps` says whether the same command may succeed later.
    """

    restart_helps: bool = False


class UserError(ShoalError):
    """An argument is wrong, or it names a wrong file, folder, address or config. The command exits with status 2."""


class ModelError(UserError):
    """A model's or a version's files cannot be used. A node that gets such a version keeps the one that it has."""


def check_extra(extra: str, what: str) -> None:
    """Raise UserError if the package of Shoal's extra `extra` is not installed. `what`: the setting that needs it."""
    if importlib.util.find_spec(package := EXTRAS[extra]) is None:
        raise UserError(f"{what} needs {package}, which is not installed; pip install 'shoal[{extra}]'")


def user_path(name: str) -> Path:
    """Return the path that a user wrote, with the home folder in place of ~ or ~user. Raise UserError."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{name}: this home folder is unknown; write the full path") from error


def restart_helps(error: Exception) -> bool:
    """Return whether a process that ended with `error` may succeed if it is started again unchanged."""
    if isinstance(error, ShoalError):
        return error.restart_helps
    return not (isinstance(error, OSError) and (error.errno in LASTING or disk_is_full(error)))


def disk_is_full(error: Exception) -> bool:
    """Return whether a full disk caused the error. Some libraries keep the system's message but not its number."""
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def first_line(error: Exception) -> str:
    """Return the first line of the error's message, or the error's type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def first_problem(error: "ValidationError") -> str:
    """Return pydantic's first error in one line, with the name of the field if it is about one."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))


def printable(text: str, keep: str = "\n\t") -> str:
    """Make text from other machines safe to print: replace what could move the cursor or reverse the writing direction.

    >>> printable("a\x1b[2Jb\nc")
    'a?[2Jb\nc'
    """
    return "".join(character if character.isprintable() or character in keep else "?" for character in text)
