"""How many positions a model has, and whether completions of a given length fit.

Called by worker and validator when they load a version: a pool may have been started without any check of its config.
"""

import json
from pathlib import Path

from shoal.errors import ShoalError


class TooManyTokensError(ShoalError):
    """Completions longer than the model's positions; the message names both numbers."""


def positions(folder: Path) -> int | None:
    """`max_position_embeddings` of the model in `folder`; None if its config states none."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    stated = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    return stated if isinstance(stated, int) else None


def check_max_tokens(folder: Path, max_tokens: int) -> None:
    """Raise TooManyTokensError if a completion of max_tokens leaves no position for its prompt."""
    most = positions(folder)
    if most is not None and max_tokens >= most:
        raise TooManyTokensError(
            f"sampling.max_tokens = {max_tokens}, but the model in {folder} has {most} positions for prompt and completion; "
            f"set sampling.max_tokens below {most}"
        )
