"""Conversations for supervised fine-tuning: read, encoded, split, shuffled, and packed into micro-batches.

Invariant: an update's data is a pure function of seed, epoch and data set. Every conversation that fits appears once per
epoch. Called by `sft`. Left out: data sets that do not fit in memory (four bytes per token are kept).
"""

import hashlib
import json
import logging
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config import Config, ConfigError
from shoal.config.recipe import SftSection
from shoal.learner.sft.chat import ChatTemplate, Example
from shoal.learner.sft.conversations import ConversationError, read
from shoal.model.load import eos_ids
from shoal.model.tree import Pack, assign_rows, pack

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MicroBatch:
    pack: Pack
    trained_N: Tensor  # bool, over the pack's completion tokens


@dataclass(frozen=True)
class Data:
    train: list[Example]
    heldout: list[Example]
    ends: set[int]  # tokens that end an assistant's turn

    def to_bytes(self) -> bytes:
        """For `from_bytes` on the other ranks of this machine: a line of JSON, then all tokens."""
        parts = [[[len(each.tokens), each.spans] for each in part] for part in (self.train, self.heldout)]
        tokens = b"".join(each.tokens.tobytes() for each in (*self.train, *self.heldout))
        return json.dumps([*parts, sorted(self.ends)]).encode() + b"\n" + tokens

    @classmethod
    def from_bytes(cls, data: bytes) -> "Data":
        head, _, body = data.partition(b"\n")
        train, heldout, ends = json.loads(head)
        tokens, at = array("i", body), 0
        examples = []
        for length, spans in (*train, *heldout):
            examples.append(Example(tokens[at : at + length], tuple((start, stop) for start, stop in spans)))
            at += length
        return cls(examples[: len(train)], examples[len(train) :], set(ends))


def load_data(tokenizer: Any, folder: Path, config: Config) -> Data:
    """Read, encode and split the conversations of `sft.data`. `folder` is the model's. Raises ConversationError."""
    settings = config.sft
    if not settings.data:
        raise ConfigError(
            "sft.data is empty: set it to a .jsonl or .parquet file, or to a data set of the hub, org/name"
        )
    template = ChatTemplate(tokenizer, eos_ids(folder))
    fitting, count = [], 0
    for conversation in read(settings.data):
        count += 1
        if not template.exceeds(conversation, settings.max_tokens):
            example = template.example(conversation)
            if len(example.tokens) <= settings.max_tokens:
                fitting.append(example)
    if len(fitting) < count:
        log.warning(
            "dropped %d of %d conversations: longer than sft.max_tokens = %d",
            count - len(fitting),
            count,
            settings.max_tokens,
        )
    order = random.Random(f"{config.run.seed}:heldout").sample(range(len(fitting)), len(fitting))
    kept = max(1, round(settings.eval_frac * len(fitting))) if settings.eval_frac else 0
    if len(fitting) <= kept:
        raise ConversationError(
            f"{settings.data}: of {count} conversations, {len(fitting)} fit sft.max_tokens = "
            f"{settings.max_tokens} and {kept} are held out, so none is left to train on; add data or raise sft.max_tokens"
        )
    heldout, train = [fitting[i] for i in sorted(order[:kept])], [fitting[i] for i in sorted(order[kept:])]
    log.info("%d conversations to train on, %d held out", len(train), len(heldout))
    return Data(train, heldout, template.ends)


def plan(lengths: Sequence[int], settings: SftSection, seed: int) -> list[tuple[int, list[int]]]:
    """Each update's epoch and conversations. Every conversation appears once per epoch, in a different order.

    An epoch's last update takes the rest. A plan with more epochs begins with the updates of a shorter one.
    """
    updates: list[tuple[int, list[int]]] = []
    for epoch in range(settings.epochs):
        order = list(range(len(lengths)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        if settings.batch is not None:
            batches = [order[at : at + settings.batch] for at in range(0, len(order), settings.batch)]
        else:
            sizes = [min(lengths[i], settings.batch_tokens) for i in order]  # a longer one is its own batch
            rows = assign_rows(sizes, settings.batch_tokens, in_order=True)
            batches = [[order[at] for at in row] for row in rows]
        updates += [(epoch, batch) for batch in batches]
    return updates


def micro_batches(examples: Sequence[Example], *, row_tokens: int, packs: bool = True) -> list[MicroBatch]:
    """Pack conversations side by side into rows of `row_tokens`. Every token appears exactly once.

    Without `packs`, each has a row of its own (`model/unpacked`).
    """
    rows = (
        assign_rows([len(example.tokens) for example in examples], row_tokens)
        if packs
        else [[i] for i in range(len(examples))]
    )
    return [
        MicroBatch(
            pack([examples[i].tree for i in row]),
            torch.cat([examples[i].trained_N() for i in row]),
        )
        for row in rows
    ]


def fingerprint(data: Data, config: Config) -> str:
    """A hash of everything that determines the order and content of every update."""
    settings = config.sft
    found = hashlib.sha256(repr([config.model.name, config.run.seed, settings.batch, settings.batch_tokens]).encode())
    for example in data.train:
        found.update(repr(example.spans).encode() + example.tokens.tobytes())
    return found.hexdigest()
