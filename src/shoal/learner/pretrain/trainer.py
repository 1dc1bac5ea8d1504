"""Pretraining: next-token training on a stream of text, at one or several sites.

    loss        mean over the predicted tokens of a step's sequences
    rate        linear warm-up, then cosine decay to a tenth
    optimizer   AdamW with the gradient norm clipped: DiLoCo's inner optimizer (arXiv 2311.08105, section 3 and table 5)

The code of the policy, checkpoints and sites is shared with reinforcement learning.
Invariant: a step depends only on the weights, the optimizer's moments and the place in the data, and a checkpoint holds
all three. So a resumed run equals an uninterrupted one, bitwise on the CPU. A site that comes back adopts the agreed
weights and keeps its own moments and place in the data.
Under torchrun every rank runs this loop. The leader alone reads the text and broadcasts a step's tokens.
Left out: masks between documents.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.config import Config, ConfigError
from shoal.config.sites import PretrainSection, SitesSection
from shoal.diloco.agreed import Shapes
from shoal.diloco.messages import RoundClosedError, RoundOutcome, Terms, about_model
from shoal.diloco.remote import Remote
from shoal.files import read_json, write_file
from shoal.learner.checkpoint import LearnerProgress
from shoal.learner.policy import Policy
from shoal.learner.pretrain.text import Corpus, TextPlace, TokenStream
from shoal.learner.ranks import Ranks, from_leader
from shoal.learner.sites import PolicySite
from shoal.learner.training import METRICS, Training, drop_after, plain_policy
from shoal.model.dtype import DtypeName
from shoal.model.tree import Pack, Tree, pack

OWN = {  # fields that may differ between sites and may be changed when a run is resumed
    "pretrain": {"data", "micro_batch", "checkpoint_every"},
    "sites": {"wait_s", "quorum", "sites", "listen", "url"},
}
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}  # the decay is DiLoCo's (arXiv 2311.08105, table 5)
# The last learning rate, relative to the peak. With 0, two million parameters at four sites ended with a perplexity of 25.2
# instead of 23.0, and without sites with 19.5 instead of 18.9 (1,500 steps of `benchmarks.diloco.diloco`).
LAST = 0.1


class Pretraining(Training):
    def __init__(
        self,
        policy: Policy,
        stream: TokenStream | None,
        heldout_ST: Tensor,
        config: Config,
        folder: Path,
        about: dict[str, str],
        site: "TextSite | None" = None,
    ) -> None:
        """`about` holds the settings that determine the result, by name. Only the leader uses `about` and `stream`."""
        self.stream, self.heldout_ST, self.about, self.site = stream, heldout_ST, about, site
        self.settings: PretrainSection = config.pretrain
        self.kept = 0  # the step of the newest checkpoint
        self.started_s, self.computed_s = time.monotonic(), 0.0
        super().__init__(policy, folder, self.settings.steps)
        policy.rate = lambda: rate(self.step, self.settings)

    def begin(self) -> None:
        """Restore the newest checkpoint and join the sites' meeting."""
        self.claim(self.about)
        progress = self.checkpoints.restore()
        if self.site is not None:
            self.site.begin(self.about, progress)
        self.step = self.kept = progress.step
        if self.stream is not None:
            drop_after(self.folder / METRICS, self.step)
            self.stream.move(TextPlace(**progress.place) if progress.place else None)
        if self.step:
            self.log("restored from a checkpoint; training continues with the next step")
        self.evaluate()

    def train(self) -> None:
        """Train one inner step. Meet the other sites if it is the last step of a round."""
        started_s = time.monotonic()
        ids_BT = self._sequences()
        update = self.policy.step(self._mean_loss(ids_BT), self._micro_batches(ids_BT))
        self.step += 1
        seconds = time.monotonic() - started_s
        self.computed_s += seconds
        self.record(
            loss=update["loss"],
            lr=update["optim/lr"],
            grad_norm=update["optim/grad_norm"],
            tokens=ids_BT.numel(),
            tokens_per_s=round(ids_BT.numel() / seconds),
        )
        self.log(f"loss {update['loss']:.3f}", often=True)
        if self.site is not None and self.step == self.site.due:
            self.meet(self.site, update["loss"])

    def meet(self, site: "TextSite", loss: float) -> None:
        """Offer this site's result and continue from the state that the sites agree on. A late offer is dropped."""
        outcome, before = None, site.round
        site.spent.computed_s = self.computed_s
        try:
            outcome = site.give(loss, self._place())
        except RoundClosedError as error:
            self.step = site.take_over(self.about, str(error))
        if site.round != before and site.leader is not None:  # this site applied an outcome or adopted a state
            self.record(
                round=site.round,
                quorum=outcome.kept if outcome else None,
                left_out=outcome.left_out if outcome else None,
                missing=outcome.missing if outcome else None,
                digest=site.leader.site.agreed.digest,
                sent_bytes=site.spent.sent_bytes,  # since the start, like the figures below
                received_bytes=site.spent.received_bytes,
                computed_s=round(self.computed_s, 3),
                waited_s=round(site.spent.synced_s, 3),
                elapsed_s=round(time.monotonic() - self.started_s, 3),
            )

    def keep(self, *, last: bool) -> None:
        if last or self.step % self.settings.checkpoint_every == 0:
            self.evaluate()
        if last or self.step - self.kept >= self.settings.checkpoint_every or self.step < self.kept:
            self.checkpoint()

    def checkpoint(self) -> None:
        self.kept = self.step
        self.checkpoints.begin(LearnerProgress(step=self.step, place=self._place()))

    def evaluate(self) -> None:
        """Record the mean loss over the held-out sequences, in nats per token, and its perplexity."""
        if len(self.heldout_ST):
            loss = self.policy.total(self._mean_loss(self.heldout_ST), self._micro_batches(self.heldout_ST))
            self.record(heldout_loss=loss, perplexity=round(math.exp(min(loss, 100)), 4))
            self.log(f"held-out loss {loss:.4f}")

    def pause(self) -> None:
        if self.step != self.kept:
            self.checkpoint()

    def end(self) -> None:
        super().end()
        if self.site is not None:
            self.site.leave()

    def _sequences(self) -> Tensor:
        """Return the step's tokens on every rank."""
        count, length = self.settings.batch, self.settings.tokens

        def read() -> Tensor:
            assert self.stream is not None
            return self.stream.sequences(count, length)

        return from_leader(self.ranks, read, encode, lambda data: decode(data, length))

    def _mean_loss(self, ids_BT: Tensor) -> Callable[[Pack], Tensor]:
        """Return the loss function of a micro-batch. Summed over all micro-batches it is the mean, in nats per token."""
        n_predicted = ids_BT[:, 1:].numel()

        def loss(micro: Pack) -> Tensor:
            return self.policy.summed(micro, lambda _, logp_C, __: -logp_C.sum() / n_predicted)

        return loss

    def _micro_batches(self, ids_BT: Tensor) -> list[Pack]:
        parts = torch.split(ids_BT, self.settings.micro_batch)
        return [pack([Tree(ids_T[:1], [ids_T[1:]]) for ids_T in part.numpy()]) for part in parts]

    def _place(self) -> dict[str, int] | None:
        return self.stream.place.to_json() if self.stream and self.stream.place else None


def encode(ids_BT: Tensor) -> bytes:
    """Encode token ids for `decode` on other ranks."""
    return ids_BT.numpy().tobytes()


def decode(data: bytes, length: int) -> Tensor:
    """Decode sequences of `length` tokens."""
    return torch.from_numpy(np.array(memoryview(data).cast("q"), np.int64)).view(-1, length)


def rate(step: int, settings: PretrainSection) -> float:
    """Return the learning rate of `step` (from 0): linear warm-up, then cosine decay from `lr` to `LAST` of it."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.lr * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done)))


def text_policy(folder: Path, config: Config, dtype: DtypeName, ranks: Ranks | None = None) -> Policy:
    """Load the model in `folder`, or initialise it at random, as the config's `[pretrain]` says."""
    settings = config.pretrain
    seed = config.run.seed if settings.init == "random" else None
    memory_hint = f"pretrain.micro_batch (now {settings.micro_batch})"
    return plain_policy(
        folder, config, dtype, ranks, lr=settings.lr, warmup_steps=0, memory_hint=memory_hint, seed=seed, **ADAMW
    )


def about(config: Config, folder: Path, corpus: Corpus | None, *, sites: bool) -> dict[str, str]:
    """Return the settings that determine the result. `folder` holds the model. Without a corpus, omit the data."""
    result = about_model(folder) | {"run.seed": str(config.run.seed)}
    if corpus is not None:
        result["data"] = corpus.fingerprint()
    for name in ("pretrain", "sites") if sites else ("pretrain",):
        section = getattr(config, name)
        result |= {f"{name}.{key}": str(value) for key, value in section if key not in OWN[name]}
    return result


# --- several sites -------------------------------------------------------------------------------------------------------


class TextSite(PolicySite):
    """A policy pretrained at one of several sites.

    Invariant: no sequence of an accepted offer is trained on again, because the place in the data is written to disk
    before each offer is sent.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        terms: Terms,
        link: Remote | None,
        settings: SitesSection,
        folder: Path,
        stop: threading.Event,
    ) -> None:
        super().__init__(name, policy, terms, link)
        self.inner_steps, self.stop, self.round = settings.inner_steps, stop, 0
        self.places = folder / "places.json"  # the place after each recent offer, by round; used on the leader alone

    @property
    def due(self) -> int:
        """The inner step after which the open round's offer is sent."""
        return (self.round + 1) * self.inner_steps

    def begin(self, about: dict[str, str], progress: LearnerProgress) -> None:
        """Enter the meeting, and set `progress` to the point from which to continue. Raise MeetingError."""
        places = self._saved_places()
        placed = progress.place is not None or bool(places)
        why = "the site comes back" if placed else "the site joins"
        self.round, accepted = self.enter(about, why, placed=placed)
        progress.step, progress.place = self.round * self.inner_steps, places.get(str(accepted), progress.place)

    def give(self, loss: float, place: dict[str, int] | None) -> RoundOutcome:
        """Record the next token's `place`, and meet the other sites. After RoundClosedError, call `take_over`."""
        if self.leader is not None:
            saved = {round: where for round, where in self._saved_places().items() if int(round) >= self.round - 1}
            write_file(self.places, json.dumps(saved | {str(self.round): place}).encode())
        outcome = self.meet(loss, self.stop)
        self.round = outcome.round + 1
        return outcome

    def take_over(self, about: dict[str, str], why: str) -> int:
        """Enter the meeting again after a late offer. Return the inner step of the agreed state."""
        self.round, _ = self.enter(about, why)
        return self.round * self.inner_steps

    def _saved_places(self) -> dict[str, Any]:
        return read_json(self.places) if self.leader and self.places.exists() else {}


def terms_of(config: Config, shapes: Shapes) -> Terms:
    """Return the meeting's terms. Raise ConfigError if the steps are not a whole number of rounds."""
    settings, steps = config.sites, config.pretrain.steps
    if steps % settings.inner_steps:
        raise ConfigError(
            f"pretrain.steps = {steps} is not a multiple of sites.inner_steps = {settings.inner_steps}: "
            "the last steps would never be exchanged"
        )
    return Terms(shapes, rounds=steps // settings.inner_steps, **settings.terms)
