"""Which files a source and a split name: a file, a folder, or files of a data set on the Hugging Face hub.

The rule for splits: a file belongs to the split whose name is a word of its path below the folder ("gsm8k_test.jsonl",
"test-00000-of-00001.parquet", "test/0000.parquet"). Where no file names a split, all are of the split `train`.
Invariant: the same files in any order of listing give the same answer. Called by `sources`.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from shoal.config.tasks import SourceSection
from shoal.model.hub import HubError, ask
from shoal.tasks.sources.rows import SUFFIXES
from shoal.tasks.task import TasksNotFoundError

T = TypeVar("T")
DEFAULT_SPLIT = "train"
KNOWN_SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval", "heldout")


def locate(source: SourceSection, split: str) -> list[Path]:
    """The files of one split, in the order of their names. Raises TasksNotFoundError."""
    if source.hub:
        return _from_hub(source, split)
    path = Path(source.path).expanduser()
    if path.is_dir():
        found = [one for one in path.rglob("*") if one.is_file() and one.name.endswith(SUFFIXES)]
        names = {one.relative_to(path).as_posix(): one for one in found if not one.name.startswith(".")}
        return [names[name] for name in of_split(list(names), split, str(path))]
    if not path.is_file():
        raise TasksNotFoundError(
            f"no file or folder at {path}, neither from {Path.cwd()} nor beside the config; correct the source's path"
        )
    if not path.name.endswith(SUFFIXES):
        raise TasksNotFoundError(f"{path} is neither of {', '.join(SUFFIXES)}; convert it to JSON lines")
    if split not in (DEFAULT_SPLIT, *_words(path.name)):
        raise TasksNotFoundError(
            f"{path} is one file, without a split {split!r}: leave split and heldout_split out, or give a folder with a "
            f"file for each split, for example {split}.jsonl"
        )
    return [path]


def of_split(names: Sequence[str], split: str, where: str) -> list[str]:
    """Those of the files that belong to a split. Raises TasksNotFoundError, which lists the splits that are there."""
    if not names:
        raise TasksNotFoundError(f"{where} holds no file of {', '.join(SUFFIXES)}; correct the source")
    splits = {name: [word for word in _words(name) if word == split or word in KNOWN_SPLITS] for name in sorted(names)}
    if not any(splits.values()) and split == DEFAULT_SPLIT:
        return list(splits)
    found = [name for name, words in splits.items() if split in words]
    if not found:
        known = sorted({word for words in splits.values() for word in words}) or [DEFAULT_SPLIT]
        raise TasksNotFoundError(
            f"{where} has no split {split!r}; there are {', '.join(known)}: set split or heldout_split"
        )
    return found


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


# --- the hub --------------------------------------------------------------------------------------------------------


def _from_hub(source: SourceSection, split: str) -> list[Path]:
    from huggingface_hub import HfApi, hf_hub_download

    organisation, name, *config = source.hub.strip("/").split("/")
    repository, revision = f"{organisation}/{name}", source.revision or None
    asked: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    names = _ask(source, partial(HfApi().list_repo_files, repository, **asked))
    held = [one for one in names if one.endswith(SUFFIXES)]
    chosen = of_split(_of_config(held, "/".join(config), source), split, f"data set {source.hub}")
    return [Path(_ask(source, partial(hf_hub_download, repository, one, **asked))) for one in chosen]


def _of_config(names: Sequence[str], config: str, source: SourceSection) -> list[str]:
    """The files of a config: those in a folder of its name, or with it in their name; without one, all, if one folder."""
    if config:
        found = [name for name in names if f"/{config.lower()}/" in f"/{name.lower()}"]
        found = found or [name for name in names if config.lower() in PurePosixPath(name).name.lower()]
        if not found:
            raise TasksNotFoundError(f"data set {source.hub}: no file of config {config!r}; there are {_listed(names)}")
        return found
    configs = {name.split("/")[0] for name in names if "/" in name} - {"data", *KNOWN_SPLITS}
    if len(configs) > 1:
        raise TasksNotFoundError(
            f'data set {source.hub} has several configs: write hub = "{source.hub}/CONFIG" with one of '
            f"{', '.join(sorted(configs)[:20])}"
        )
    if not names:
        raise TasksNotFoundError(
            f"data set {source.hub} holds no file of {', '.join(SUFFIXES)}; most have one at revision = "
            '"refs/convert/parquet", or convert it and set path'
        )
    return list(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:12]) or "no readable files"


def _ask(source: SourceSection, request: Callable[[], T]) -> T:
    try:
        return ask(request)
    except HubError as error:
        organisation, name, *config = source.hub.strip("/").split("/")
        raise TasksNotFoundError(
            f"data set {source.hub} could not be fetched from the Hugging Face hub ({error}); without a connection, "
            f"download it elsewhere (hf download {organisation}/{name} --repo-type dataset --local-dir FOLDER) and set "
            f'path = "{"/".join(["FOLDER", *config])}" in place of hub'
        ) from error
