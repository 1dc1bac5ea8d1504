"""Where versions come from: a model, the folder of a run (live or finished), or a folder of fetched versions.

    runs/quickstart     learner/versions/v000016 and the model it began with (version 0)
    weights             v000003, v000004, ...: what `shoal fetch URL --out weights --follow` keeps
    bundled:tiny, PATH  one model

Invariant: an offer's folder holds complete weights when it is listed; a live run may remove it later.
Called by `versions`. Left out: fetching; `shoal fetch --follow` does that, with every check.
"""

from dataclasses import dataclass
from pathlib import Path

from shoal import config as config_module
from shoal.config import Config
from shoal.errors import UserError
from shoal.evals.local import label_of
from shoal.model import sources
from shoal.model.load import WEIGHTS
from shoal.shardcast.manifest import parse_version

CONFIG = "config.toml"
VERSIONS = Path("learner") / "versions"


class SourceError(UserError):
    """What was named holds nothing that can be served."""


@dataclass(frozen=True)
class Offer:
    """One set of weights. `version` is None for a model outside of any run."""

    id: str
    version: int | None
    folder: Path


@dataclass(frozen=True)
class Source:
    """`name` is the newest version; `name@7` is version 7."""

    name: str
    folder: Path | None  # of the versions; None: one model
    base: Path | None  # the model itself, or the one that the run began with
    config: Config | None = None  # the run's

    def offers(self) -> list[Offer]:
        """What can be loaded now, newest first."""
        if self.folder is None:
            return [Offer(self.name, None, self.base)] if self.base else []
        found: dict[int, Path] = {0: self.base} if self.base else {}
        for path in self.folder.glob("v*"):
            version = parse_version(path.name)
            if version is not None and (path / WEIGHTS).exists():
                found[version] = path
        return [Offer(f"{self.name}@{version}", version, found[version]) for version in sorted(found, reverse=True)]


def source_of(what: str) -> Source:
    """The source that a person named: a run's folder, a folder of versions, or a model. Raises SourceError,
    ModelNotFoundError, ConfigError."""
    path, name = Path(what).expanduser(), label_of(what, [what])
    if path.is_dir() and (path / CONFIG).is_file():
        config = config_module.load(path / CONFIG)
        return Source(name, path / VERSIONS, _base(config.model.name), config)
    if path.is_dir() and not (path / "config.json").is_file():
        if any(parse_version(one.name) is not None for one in path.iterdir()):
            return Source(name, path, None)
        raise SourceError(
            f"{path} holds neither a run ({CONFIG}), a model (config.json) nor versions (v000001); name one of these"
        )
    return Source(name.removeprefix("bundled:"), None, path if path.is_dir() else sources.resolve(what))


def _base(name: str) -> Path | None:
    """The model that a run began with, if it is on this machine."""
    try:
        return sources.resolve(name)
    except sources.ModelNotFoundError:
        return None
