"""Requests to the Hugging Face hub: whatever fails is one error, whose message is the first line of the cause.

Called by whoever fetches models, tasks, conversations or text; each adds what was asked for, and the next step.
"""

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from shoal.errors import ShoalError, first_line

T = TypeVar("T")


class HubError(ShoalError):
    """The hub was not reached, or it does not have what was asked for."""


def ask(request: Callable[[], T]) -> T:
    """Raises HubError."""
    from huggingface_hub import errors

    of_its_http: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # the library differs by version
    try:
        return request()
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        of_its_http,
        OSError,
    ) as error:
        raise HubError(first_line(error)) from error


def data_files(name: str, patterns: list[str]) -> list[Path]:
    """The files of a data set that match a pattern, downloaded, in the order of their names. Raises HubError."""
    from huggingface_hub import snapshot_download

    folder = Path(ask(lambda: snapshot_download(name, repo_type="dataset", allow_patterns=patterns)))
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return [names[one] for one in sorted(names) if any(fnmatch(one, pattern) for pattern in patterns)]
