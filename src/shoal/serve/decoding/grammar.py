"""Replies that must fit a JSON schema: before each token, which tokens may stand there (llguidance, an extra).

    compiled   a schema and a tokenizer -> a Grammar, once for each completion
    Grammar    allowed -> the engine draws among these -> take

Invariant: a reply that ends by itself fits the schema; one that is cut is the beginning of one that does. The token is the
seed's among those that are allowed, so such a reply is not drawn from the full distribution and has no proof.
Called by `routes` (compiled, in a thread) and by `Generation`. Left out: other grammars than JSON's.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.serve.decoding.text import Finish
from shoal.serve.versions import Held

# No more space than Python writes: a model may write spaces for ever.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(ShoalError):
    """A schema that cannot be followed, or a server that cannot follow any."""


class Grammar:
    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Tensor:
        """(V,) bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_))

    def take(self, token: int) -> Finish | None:
        """Why the reply ends with this token, if it does. A matcher that meets one of its limits cuts it."""
        if not self._matcher.consume_token(token):
            return "length"
        return "stop" if self._matcher.is_stopped() else None


def compiled(schema: Mapping[str, Any], held: Held, count: int) -> list[Grammar]:
    """A grammar for each of `count` completions. Takes up to seconds, the first time. Raises GrammarError."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise GrammarError(
            "this server cannot force a reply's form: pip install 'shoal[guided]' there, or ask for JSON in the prompt"
        ) from error
    vocabulary = held.engine.model.config.get_text_config(decoder=True).vocab_size
    if held.guide is None:
        try:
            held.guide = llguidance.hf.from_tokenizer(held.tokenizer, n_vocab=vocabulary, eos_token=list(held.eos_ids))
        except ValueError as error:
            raise GrammarError(f"no reply's form can be forced with this model's tokenizer: {error}") from error
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACES)
    matcher = llguidance.LLMatcher(held.guide, grammar, log_level=0)
    if matcher.is_error():
        raise GrammarError(f"this schema cannot be followed: {matcher.get_error().splitlines()[0][:300]}")
    return [Grammar(matcher.deep_copy(), vocabulary) for _ in range(count)]
