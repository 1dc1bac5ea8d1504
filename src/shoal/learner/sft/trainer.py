"""Supervised fine-tuning: next-token training on conversations, with loss on the assistant's tokens.

It shares the policy, packing and checkpoints with reinforcement learning. The loss of an update is the mean over the trained
tokens of all its micro-batches.
Invariant: the conversations of an update are a pure function of seed, epoch and data. Every conversation of at most
`sft.max_tokens` appears once per epoch. So the count of finished updates is the position in the data, and a resumed run
equals an uninterrupted one (bitwise on the CPU).
Under torchrun every rank runs this loop and computes its share of each update's micro-batches; the leader writes the files.
Left out: learning-rate decay, LoRA, data sets that do not fit in memory (at four bytes per token).
"""

import hashlib
import json
import logging
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config import Config, ConfigError
from shoal.config.recipe import SftSection
from shoal.errors import UserError
from shoal.learner.checkpoint import LearnerProgress
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.sft.conversations import ChatTemplate, Example, read
from shoal.learner.training import METRICS, Training, drop_after, plain_policy
from shoal.model.dtype import DtypeName
from shoal.model.load import eos_ids
from shoal.model.tree import Pack, assign_rows, pack

DIFFERS = "another model, seed, batch or data (sft.max_tokens and sft.eval_frac change the data)"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftBatch:
    pack: Pack
    trained_N: Tensor  # bool, over the pack's completion tokens


@dataclass(frozen=True)
class Data:
    train: list[Example]
    heldout: list[Example]
    ends: set[int]  # tokens that end assistant turns

    def to_bytes(self) -> bytes:
        """Encode for `from_bytes` on the other ranks of this machine: a line of JSON, then all tokens."""
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
    """Read, encode and split the conversations of `sft.data`. The model is in `folder`. Raise UserError."""
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
            "dropped %d of %d conversations, because they are longer than sft.max_tokens = %d",
            count - len(fitting),
            count,
            settings.max_tokens,
        )
    order = random.Random(f"{config.run.seed}:heldout").sample(range(len(fitting)), len(fitting))
    n_heldout = max(1, round(settings.eval_frac * len(fitting))) if settings.eval_frac else 0
    if len(fitting) <= n_heldout:
        raise UserError(
            f"{settings.data}: of {count} conversations, {len(fitting)} fit sft.max_tokens = "
            f"{settings.max_tokens} and {n_heldout} are held out; none is left to train on: add data or raise sft.max_tokens"
        )
    heldout, train = [fitting[i] for i in sorted(order[:n_heldout])], [fitting[i] for i in sorted(order[n_heldout:])]
    log.info("%d conversations to train on, %d held out", len(train), len(heldout))
    return Data(train, heldout, template.ends)


def plan(count: int, settings: SftSection, seed: int) -> list[tuple[int, list[int]]]:
    """Plan the updates over `count` conversations. Return each update's epoch and conversation indices.

    Every conversation appears once per epoch, in a new order. An epoch's last update may be smaller. More epochs only append
    updates to the plan.
    """
    updates: list[tuple[int, list[int]]] = []
    for epoch in range(settings.epochs):
        order = list(range(count))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        updates += [(epoch, order[at : at + settings.batch]) for at in range(0, len(order), settings.batch)]
    return updates


def micro_batches(examples: Sequence[Example], *, row_tokens: int) -> list[SftBatch]:
    """Pack conversations into rows of `row_tokens`. Every token appears exactly once."""
    rows = assign_rows([len(example.tokens) for example in examples], row_tokens)
    return [
        SftBatch(pack([examples[i].tree for i in row]), torch.cat([examples[i].trained_N() for i in row]))
        for row in rows
    ]


def fingerprint(data: Data, config: Config) -> str:
    """Hash everything that determines the content and order of the updates."""
    settings = config.sft
    result = hashlib.sha256(repr([config.model.name, config.run.seed, settings.batch]).encode())
    for example in data.train:
        result.update(repr(example.spans).encode() + example.tokens.tobytes())
    return result.hexdigest()


# --- training ------------------------------------------------------------------------------------------------------------


class Sft(Training):
    def __init__(self, policy: Policy, data: Data, config: Config, folder: Path) -> None:
        self.data, self.config = data, config
        self.plan = plan(len(data.train), config.sft, config.run.seed)
        super().__init__(policy, folder, len(self.plan))

    def begin(self) -> None:
        """Claim the folder and restore the newest checkpoint. Raise ConfigError for another run's folder."""
        self.claim({"fingerprint": fingerprint(self.data, self.config)}, DIFFERS)
        self.step = self.checkpoints.restore().step
        if self.leads:
            drop_after(self.folder / METRICS, self.step)
        if self.step:
            self.log("restored from a checkpoint; training continues with the next step")
        else:
            self.evaluate()

    def train(self) -> None:
        started_s = time.monotonic()
        epoch, members = self.plan[self.step]
        examples = [self.data.train[i] for i in members]
        update = self.policy.step(self._mean_loss(examples), self._micro_batches(examples))
        seconds = time.monotonic() - started_s
        n_tokens = sum(len(example.tokens) for example in examples)
        self.step += 1
        self.record(
            epoch=epoch,
            loss=update["loss"],
            grad_norm=update["optim/grad_norm"],
            lr=update["optim/lr"],
            conversations=len(examples),
            trained_tokens=sum(example.n_trained for example in examples),
            tokens=n_tokens,
            tokens_per_s=round(n_tokens / seconds, 1),
        )
        self.log(f"loss {update['loss']:.3f}, {n_tokens / seconds:.0f} tokens/s", often=True)

    def evaluate(self) -> None:
        """Record the mean loss over all trained tokens of the held-out conversations."""
        if self.data.heldout:
            loss = self._mean_loss(self.data.heldout)
            total = self.policy.total(loss, self._micro_batches(self.data.heldout))
            self.record(heldout_loss=total)
            self.log(f"held-out loss {total:.3f}")

    def keep(self, *, last: bool) -> None:
        every = self.config.sft.checkpoint_every
        if last or (every and self.step % every == 0):
            self.evaluate()
            if every:
                self.checkpoints.begin(LearnerProgress(step=self.step))

    def pause(self) -> None:
        self.keep(last=True)

    def write_model(self, final: Path) -> None:
        if self.leads:
            _declare_ends(self.policy.model, self.data.ends)
        super().write_model(final)

    def _mean_loss(self, examples: Sequence[Example]) -> Any:
        """Return the loss function of a micro-batch. The losses of all micro-batches sum to the mean, in nats per token."""
        n_trained = sum(example.n_trained for example in examples)

        def loss(micro: SftBatch) -> Tensor:
            trained_N = micro.trained_N.to(self.policy.device)

            def loss_of(targets: slice, logp_C: Tensor, _: Tensor | None) -> Tensor:
                return -logp_C[trained_N[targets]].sum() / n_trained

            return self.policy.summed(micro.pack, loss_of)

        return loss

    def _micro_batches(self, examples: Sequence[Example]) -> list[SftBatch]:
        return micro_batches(examples, row_tokens=self.config.sft.max_tokens)


def open_policy(folder: Path, config: Config, dtype: DtypeName, ranks: Ranks | None = None) -> Policy:
    """Load the model in `folder` with the learning rate of `[sft]`."""
    settings = config.sft
    return plain_policy(
        folder,
        config,
        dtype,
        ranks,
        lr=settings.lr,
        warmup_steps=settings.warmup_steps,
        memory_hint=f"sft.max_tokens (now {settings.max_tokens})",
    )


def _declare_ends(model: Any, ends: set[int]) -> None:
    """Add the tokens that ended training turns to the EOS tokens in the model's generation config."""
    declared = model.generation_config.eos_token_id
    eos = declared if isinstance(declared, list) else [declared] if declared is not None else []
    if ends - set(eos):
        model.generation_config.eos_token_id = [*eos, *sorted(ends - set(eos))]
