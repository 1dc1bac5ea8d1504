"""Where a pool's coordinator is: a URL, and the file in its folder that holds it.

Invariant: a URL is http(s)://HOST[:PORT] and nothing else, so that signed paths are the same on both sides.
Written by the coordinator and `shoal pool init`; read by `shoal pool invite`, `shoal pool status` and `shoal run --resume`.
"""

import re
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import UserError
from shoal.files import write_file

FILE = "coordinator.json"
FOREIGN = re.compile(r"[\s?#@]")  # of a query, a fragment or a user; urlsplit drops some of these without a word


class AddressError(UserError):
    """A text that is not the URL of a coordinator, or a folder that holds none."""


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    run: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The address in a coordinator's folder, or in the folder of a whole run. Raises AddressError."""
        run = folder / "coordinator" / FILE
        path = run if run.exists() else folder / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise AddressError(f"{path} is damaged: restore the folder from its backup (shoal pool backup)") from error
        except OSError as error:
            raise AddressError(
                f"{folder} is neither the folder of a run nor of a coordinator that was started: {path.name} cannot be "
                f"read there ({error.strerror})"
            ) from error

    def write(self, folder: Path) -> None:
        write_file(folder / FILE, self.model_dump_json().encode())


def server_url(text: str) -> str:
    """`text` without a trailing slash. Raises AddressError unless it is http(s)://HOST[:PORT]."""
    try:
        parts = urlsplit(text)
        has_port = parts.port is None or parts.port > 0  # parts.port raises ValueError for what is not a port
    except ValueError:
        parts, has_port = urlsplit(""), False
    rest = parts.path.strip("/") or FOREIGN.search(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port or rest or len(text) > 150:
        raise AddressError(f"{text[:80]!r} is not a coordinator's URL: write http://HOST:PORT")
    return text.rstrip("/")


def find_coordinator(where: str) -> str:
    """The coordinator's URL, given as itself or as a folder that holds it. Raises AddressError."""
    if "://" in where:
        return server_url(where)
    if not Path(where).is_dir():
        raise AddressError(f"{where[:80]!r} is neither a folder nor a coordinator's URL, as in http://HOST:PORT")
    return Address.read(Path(where)).url
