"""How many positions a model has, and whether completions of a given length fit.

Called by worker and validator when they load a version: a pool may have been started without any check of its config.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError


class TooManyTokensError(ShoalError):
    """Completions longer than the model's positions; the message names both numbers."""


def positions(config: Mapping[str, Any]) -> int | None:
    """`max_position_embeddings` of a model with this config.json; None if it states none."""
    stated = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return stated if isinstance(stated, int) else None


def check_max_tokens(folder: Path, max_tokens: int) -> None:
    """Raise TooManyTokensError if a completion of max_tokens leaves no position for its prompt."""
    most = positions(json.loads((folder / "config.json").read_text("utf-8")))
    if most is not None and max_tokens >= most:
        raise TooManyTokensError(
            f"sampling.max_tokens = {max_tokens}, but the model in {folder} has {most} positions for prompt and completion; "
            f"set sampling.max_tokens below {most}"
        )
