"""What has to be there before a run: the model in the cache, and the dtype this machine computes in.

Called by `shoal prepare`, `shoal sft` and, in a process of its own, by `shoal run`, which itself never imports torch.
"""

from pathlib import Path
from typing import Any

from shoal import tasks
from shoal.config import Config, ConfigError
from shoal.launch.check import check_length
from shoal.model import dtype, sources


def prepare(config: Config) -> dict[str, Any]:
    """Fetch, convert or train the model and pick the dtype. Returns both, with the measured GFLOP/s.

    Raises ConfigError, ModelNotFoundError.
    """
    try:
        tasks.load(config.tasks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_length(config, fetch=True)
    folder = model_folder(config.model.name)
    picked, gflops = dtype.pick(config.model.dtype, config.model.device)
    return {"folder": str(folder), "dtype": picked, "gflops": {k: round(v, 1) for k, v in gflops.items()}}


def model_folder(name: str) -> Path:
    """The folder of model `name`, made first where it is `bundled:tiny` and not there yet."""
    if name == sources.TINY and not (sources.tiny_dir() / "config.json").exists():
        from shoal.sft.tiny import train_tiny

        train_tiny()
    return sources.resolve(name)
