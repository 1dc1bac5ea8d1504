"""Models on this machine as contestants: found by name, folder or run, named by a digest of their files.

Invariant: the digest covers every file that a completion depends on, so an evaluation never continues with other weights.
Called by `shoal eval`.
"""

from collections.abc import Sequence
from pathlib import Path

from shoal.evals.completions import EvalUsageError
from shoal.evals.evaluate import Contestant
from shoal.evals.samplers import EngineSampler
from shoal.model import sources
from shoal.model.dtype import DtypeName
from shoal.watch.summary import MODEL

COUNTED = (".json", ".jinja", ".safetensors", ".txt", ".model")


def folder_of(name: str) -> Path:
    """The folder of a model given by its name, its folder or its run's. Raises EvalUsageError, ModelNotFoundError."""
    path = Path(name).expanduser()
    if not path.is_dir():
        return sources.resolve(name)
    for folder in (path, path / MODEL):
        if (folder / "config.json").is_file():
            return folder
    raise EvalUsageError(
        f"{path} holds no model: neither config.json nor {MODEL}/config.json, which a run writes at its end; for a "
        "version of a run under way give its own folder"
    )


def label_of(name: str, names: Sequence[str]) -> str:
    """The last part of a path or name, or all of it where another model has the same last part.

    >>> label_of("runs/a", ["runs/a", "runs/b"]), label_of("a/model", ["a/model", "b/model"])
    ('a', 'a/model')
    """

    def last(one: str) -> str:
        return one.rstrip("/").rpartition("/")[2] or one

    return last(name) if [last(other) for other in names].count(last(name)) == 1 else name


def local(label: str, folder: Path, dtype: DtypeName, device: str, batch: int) -> Contestant:
    facts = {"digest": digest(folder), "dtype": dtype, "device": device, "batch": batch}

    def open_it() -> EngineSampler:
        from shoal.engine.torch_engine import TorchEngine

        return EngineSampler(TorchEngine(dtype, device), folder, batch)

    return Contestant(label, facts, open_it)


def digest(folder: Path) -> str:
    """BLAKE3 over names and contents of the files that make up a model."""
    from blake3 import blake3

    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in COUNTED)
    whole = blake3()
    for path in files:
        one = blake3(max_threads=blake3.AUTO)
        one.update_mmap(path.resolve())
        whole.update(f"{path.name} {one.hexdigest()}\n".encode())
    return whole.hexdigest()
