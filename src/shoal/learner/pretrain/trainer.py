"""Pretraining: next-token training on a stream of text, alone or as one of several sites.

    loss   mean over the predicted tokens of a step's sequences     rate   linear warm-up, then a cosine to `final_lr`
    inner optimizer AdamW, gradients clipped by their norm: DiLoCo (arXiv 2311.08105), section 3 and table 5

Invariant: a step's result is a function of the weights, moments and place in the data, all of which a checkpoint holds. So
a resumed training equals the uninterrupted one, bit for bit on the CPU.
Called by `shoal pretrain`, on the leader of a site's ranks (`net`). Left out: masks between documents.
"""

import json
import logging
import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.config import Config
from shoal.config.sites import PretrainSection
from shoal.diloco.messages import Outcome
from shoal.files import commit_folder
from shoal.learner.folder import claim, drop_after
from shoal.learner.pretrain import checkpoint
from shoal.learner.pretrain.checkpoint import Progress
from shoal.learner.pretrain.net import Net
from shoal.learner.pretrain.outer import Outer
from shoal.learner.pretrain.stream import Place, Stream
from shoal.model.load import save_model, stored_shapes

LOG_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Pretraining:
    def __init__(
        self,
        net: Net,
        tokenizer: Any,
        stream: Stream,
        heldout_ST: Tensor,
        config: Config,
        folder: Path,
        outer: Outer | None = None,
    ) -> None:
        self.net, self.tokenizer, self.stream, self.heldout_ST = net, tokenizer, stream, heldout_ST
        self.settings: PretrainSection = config.pretrain
        self.folder, self.outer = folder, outer
        self.progress = Progress()
        self.kept = 0  # the step of the newest checkpoint
        self.started_s, self.logged_s, self.computed_s = time.monotonic(), 0.0, 0.0

    def run(self, about: dict[str, str], stop: threading.Event) -> Path | None:
        """Train to the last step, or until `stop`. Returns the model's folder, or None if stopped."""
        claim(self.folder, about)
        self.resume(about)
        self.evaluate()
        while self.progress.step < self.settings.steps:
            if stop.is_set():
                self.finish()
                return None
            self.train()
            self.meet()
            self.keep()
        self.finish()
        return self.publish()

    def resume(self, about: dict[str, str]) -> None:
        """Take up the newest checkpoint, and the place in the sites' meeting."""
        found = checkpoint.read(self.folder / "checkpoints")
        if found is not None:
            self.progress = found
            self.net.restore(found.tensors, updates=found.updates)
            self.net.pull()
            log.info("going on after step %d of %d", found.step, self.settings.steps)
        if self.outer is not None:
            self.progress = self.outer.begin(about, self.progress, found is not None)
        self.net.push()
        self.kept = self.progress.step
        drop_after(self.metrics, self.progress.step)
        place = self.progress.place
        self.stream.move(Place(**place) if place else None)
        self.progress.tensors = {}

    def train(self) -> None:
        """One inner step."""
        started_s = time.monotonic()
        ids_BT = self.stream.sequences(self.settings.batch, self.settings.tokens)
        lr = rate(self.progress.step, self.settings)
        loss, norm = self.net.step(ids_BT, lr=lr, number=self.progress.step + 1)
        self.progress.step += 1
        seconds = time.monotonic() - started_s
        self.computed_s += seconds
        if self.outer is not None:
            self.outer.loss, self.outer.computed_s = loss, self.computed_s
        figures = {"loss": loss, "lr": lr, "grad_norm": norm, "tokens": ids_BT.numel()}
        self.record(**figures, tokens_per_s=round(ids_BT.numel() / seconds))
        if time.monotonic() - self.logged_s > LOG_EVERY_S:
            self.logged_s = time.monotonic()
            log.info("step %d of %d: loss %.3f", self.progress.step, self.settings.steps, loss)

    def meet(self) -> None:
        """The sites' part of a step: give and take where a round is due."""
        if self.outer is None or not self.outer.due(self.progress.step):
            return
        place = self.stream.place.to_json() if self.stream.place else None
        self.net.pull()
        round = self.outer.site.round
        self.progress.step, outcome = self.outer.after(self.progress.step, place, self.net.reset)
        self.net.push()
        if self.outer.site.round != round:  # applied, or healed after a round it was late for
            self._record_round(outcome)

    def keep(self) -> None:
        """Every few steps and at the end: measure the held-out loss; write a checkpoint."""
        step, last = self.progress.step, self.progress.step >= self.settings.steps
        if last or step % self.settings.checkpoint_every == 0:
            self.evaluate()
        if last or step - self.kept >= self.settings.checkpoint_every or step < self.kept:
            self.checkpoint()

    def checkpoint(self) -> None:
        if self.outer is not None and self.outer.flight:
            return  # what travels is in no checkpoint; the next step, or the one that lands it, writes one
        self.kept = self.progress.step
        self.progress.place = self.stream.place.to_json() if self.stream.place else None
        self.progress.round = self.outer.site.round if self.outer else 0
        self.progress.updates = self.net.updates
        self.progress.tensors = self.net.state() | (self.outer.state() if self.outer else {})
        checkpoint.write(self.folder / "checkpoints", self.progress)
        self.progress.tensors = {}

    def evaluate(self) -> None:
        """Record the mean loss over the held-out sequences, in nats per token, and its perplexity."""
        if len(self.heldout_ST):
            loss = self.net.evaluate(self.heldout_ST)
            self.record(heldout_loss=loss, perplexity=round(math.exp(min(loss, 100)), 4))
            log.info("step %d: held-out loss %.4f", self.progress.step, loss)

    def finish(self) -> None:
        if self.progress.step != self.kept:
            self.checkpoint()
        if self.outer is not None:
            self.outer.end()

    def publish(self) -> Path:
        """Write the model as a Hugging Face folder, which appears whole or not at all. Returns it."""
        final, temporary = self.folder / "model", self.folder / ".model"
        shutil.rmtree(temporary, ignore_errors=True)
        self.net.pull()
        tensors, shapes = self.net.model.state_dict() | self.net.tensors, stored_shapes(self.net.model)
        save_model(self.net.model, self.tokenizer, temporary, ((name, tensors[name]) for name in shapes), shapes)
        shutil.rmtree(final, ignore_errors=True)
        commit_folder(temporary, final)
        return final

    def record(self, **figures: Any) -> None:
        """Append one line to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(json.dumps({"step": self.progress.step, **figures}) + "\n")

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _record_round(self, outcome: Outcome | None) -> None:
        assert self.outer is not None
        self.record(
            round=self.outer.site.round,
            quorum=outcome.kept if outcome else None,
            left_out=outcome.left_out if outcome else None,
            missing=outcome.missing if outcome else None,
            digests=self.outer.site.agreed.digests,
            sent_bytes=self.outer.sent_bytes,  # since the start, like the rest
            received_bytes=self.outer.received_bytes,
            computed_s=round(self.computed_s, 3),
            waited_s=round(self.outer.waited_s, 3),
            elapsed_s=round(time.monotonic() - self.started_s, 3),
        )


def rate(step: int, settings: PretrainSection) -> float:
    """The learning rate of step `step`, from 0: linear warm-up, then half a cosine from `lr` to `final_lr`."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.final_lr + (settings.lr - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
