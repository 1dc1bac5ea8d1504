"""The slower path for models that packed rows would compute wrongly: one sequence a row, by transformers' own attention.

State spaces, linear attention, convolutions, position biases, sinks, windows and soft-capped attention pass something
between positions, or limit it, in ways that Shoal's attention does not know. Here a completion is computed behind its own
copy of the prompt, alone, so every model computes its sequences correctly.
Invariant: results are those of transformers' eager forward of each sequence. Called by `tree.forward_row`, for models that
`support` put on this path. Left out: sharing the prompt, batches, caches.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.model import attention, exact

if TYPE_CHECKING:
    from shoal.model.tree import Pack

NAME = "eager"  # transformers' attention without kernels: every model has it, and it knows sinks and caps


def packs(model: Any) -> bool:
    """Whether the model computes packed rows; otherwise it is on the slower path."""
    return model.config._attn_implementation in (attention.NAME, exact.NAME)


def body(model: Any) -> Any:
    """The model without its output head."""
    for inner in (model.base_model, model.get_decoder()):
        if inner is not model:
            return inner
    return model.model  # transformers names no part of Llama 4's text model


def use_(model: Any, name: str = NAME) -> None:
    """Put the model on the slower path, or on that of another attention."""
    model.set_attn_implementation(name)
    model.config._attn_implementation = (
        name  # old architectures have one attention and do not take it, but make masks by it
    )


def forward_row(model: Any, packed: "Pack") -> Tensor:
    """Final hidden states of every position of the row; those of a prompt are its first sequence's. Returns hidden_TH."""
    found: list[Tensor] = []
    root = packed.layout.root
    for span in packed.layout.spans:
        prompt = torch.cat([packed.tokens_T[:root], packed.tokens_T[span.start : span.branches]])
        at = span.branches
        for number, length in enumerate(span.completions or (0,)):
            tokens_L = torch.cat([prompt, packed.tokens_T[at : at + length]])
            hidden_LH = forward(model, tokens_L[None])[0]
            known = len(prompt) if number else root if found else 0
            found.append(hidden_LH[known:])
            at += length
    return torch.cat(found)


def forward(model: Any, tokens_BL: Tensor) -> Tensor:
    """Final hidden states of sequences of equal length. Returns hidden_BLH."""
    hidden_BLH: Tensor = body(model)(input_ids=tokens_BL, use_cache=False).last_hidden_state
    return hidden_BLH
