"""How many positions a model has, and whether completions of a given length fit.

With RoPE of type `dynamic` or `longrope` all positions turn differently once a sequence exceeds a length that the config
names. Then a token's logprob would depend on how long its sequence becomes, and decoding would not agree with a prefill. So
that length is the model's last position here, and `limit_` holds every forward to it.
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
    """How many positions a model with this config.json has; None if it states none."""
    text = config.get("text_config") or {}
    stated = config.get("max_position_embeddings") or text.get("max_position_embeddings")
    found = [value for value in (stated, _until_rope_changes(config)) if isinstance(value, int)]
    return min(found, default=None)


def _until_rope_changes(config: Mapping[str, Any]) -> int | None:
    """The longest sequence whose positions turn as those of shorter ones; None if all do."""
    found = []
    for section in (config, config.get("text_config") or {}):
        for field in ("rope_parameters", "rope_scaling"):
            rope = section.get(field) or {}
            for one in [rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))]:  # one per layer type
                kind = one.get("rope_type") or one.get("type")
                if kind == "dynamic":
                    found.append(section.get("max_position_embeddings"))
                if kind in ("longrope", "su"):
                    found.append(
                        one.get("original_max_position_embeddings") or section.get("original_max_position_embeddings")
                    )
    return min((value for value in found if value), default=None)


def limit_(model: Any, config: Mapping[str, Any]) -> None:
    """Refuse forwards beyond the length at which RoPE changes. They raise TooManyTokensError."""
    most = _until_rope_changes(config)
    if most is None:
        return

    def check(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = kwargs.get("position_ids")
        longest = kwargs["input_ids"].shape[-1] if at is None else int(at.max()) + 1
        if longest > most:
            raise TooManyTokensError(
                f"a sequence of {longest} tokens: the model's RoPE changes beyond {most}, and with it the logprobs of all "
                "tokens before; lower sampling.max_tokens"
            )

    from shoal.model.unpacked import body  # with torch, which reading a config does not need

    body(model).register_forward_pre_hook(check, with_kwargs=True)


def check_max_tokens(folder: Path, max_tokens: int) -> None:
    """Raise TooManyTokensError if a completion of max_tokens leaves no position for its prompt."""
    most = positions(json.loads((folder / "config.json").read_text("utf-8")))
    if most is not None and max_tokens >= most:
        raise TooManyTokensError(
            f"sampling.max_tokens = {max_tokens}, but the model in {folder} has {most} positions for prompt and completion; "
            f"set sampling.max_tokens below {most}"
        )
