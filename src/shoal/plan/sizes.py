"""A dense decoder's sizes, by the fields of its config.json.

    attention of a layer   hidden x (heads + 2 kv_heads) x head_dim, and heads x head_dim x hidden back
    MLP of a layer         3 x hidden x intermediate (gate, up, down)
    head                   vocabulary x hidden, twice in memory unless tied to the embedding

Invariant: a model that is not of this form is refused, not guessed. Left out: biases and norms (under 0.1 %).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import UserError

OPTIONAL = ("head_dim", "num_key_value_heads")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class SizesError(UserError):
    """A config.json whose sizes are not those of a dense decoder."""


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    layers: int
    width: int  # of attention: heads x head size
    kv_width: int  # of keys, and of values
    vocab: int
    tied: bool

    @property
    def body(self) -> int:
        """Parameters of the matrices that every position goes through."""
        attention = self.hidden * (self.width + 2 * self.kv_width) + self.width * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)


def sizes_of(config: Mapping[str, Any], name: str = "config.json") -> Sizes:
    """Sizes by a config.json; `name`: where they are from, for errors. Raises SizesError."""
    if missing := [field for field in NEEDED if not isinstance(config.get(field), int)]:
        raise SizesError(f"{name} lacks {', '.join(missing)}: give --sizes FIELD=N,... with all of {', '.join(NEEDED)}")
    if wrong := [field for field in (*NEEDED, *OPTIONAL) if isinstance(config.get(field), int) and config[field] < 1]:
        raise SizesError(f"{name}: {wrong[0]} = {config[wrong[0]]}: a size is 1 or more")
    if experts := next(
        (key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None
    ):
        raise SizesError(f"{name}: {experts} makes it a mixture of experts, which this arithmetic does not cover")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return Sizes(
        hidden=hidden,
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        width=heads * head_dim,
        kv_width=(config.get("num_key_value_heads") or heads) * head_dim,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )


BUNDLED = {  # known before they are made on this machine; a test compares them with the models
    "bundled:smollm2-135m-instruct": Sizes(576, 1536, 30, 576, 192, 49152, True),
    "bundled:tiny": Sizes(256, 704, 4, 256, 128, 128, True),
}
