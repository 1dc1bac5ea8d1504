"""Pretraining: next-token training on a stream of text, alone or as one of several sites.

    loss   mean over the predicted tokens of a step's sequences     rate   linear warm-up, then a cosine to `final_lr`
    inner optimizer AdamW, gradients clipped by their norm: DiLoCo (arXiv 2311.08105), section 3 and table 5

Invariant: a step's result is a function of the weights, moments and place in the data, all of which a checkpoint holds. So
a resumed training equals the uninterrupted one, bit for bit on the CPU.
Called by `shoal pretrain`. Left out: several devices at one site (FSDP2 is in `learner.ranks`), masks between documents.
"""

import json
import logging
import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config import Config, ConfigError
from shoal.config.sites import PretrainSection
from shoal.diloco.messages import Outcome
from shoal.errors import ShoalError
from shoal.files import fsync, write_file
from shoal.model.load import save_model
from shoal.pretrain import checkpoint
from shoal.pretrain.checkpoint import Progress
from shoal.pretrain.outer import Outer, named
from shoal.pretrain.stream import Place, Stream

LOG_EVERY_S = 1.0

log = logging.getLogger(__name__)


class DivergedError(ShoalError):
    """The loss is not finite. Nothing was updated."""


class Pretraining:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stream: Stream,
        heldout_ST: Tensor,
        config: Config,
        folder: Path,
        *,
        autocast: bool = False,
        outer: Outer | None = None,
    ) -> None:
        self.model, self.tokenizer, self.stream, self.heldout_ST = model, tokenizer, stream, heldout_ST
        self.settings: PretrainSection = config.pretrain
        self.config, self.folder, self.autocast, self.outer = config, folder, autocast, outer
        self.tensors = named(model)
        self.progress = Progress()
        self.optimizer = self._optimizer()
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
            self._restore(found.tensors)
            log.info("going on after step %d of %d", found.step, self.settings.steps)
        if self.outer is not None:
            self.progress = self.outer.begin(about, self.progress, found is not None)
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
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._accumulate(ids_BT)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"step {self.progress.step + 1}: the loss is {loss}, the gradient's norm {norm}: lower pretrain.lr, or "
                "look at the data there"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.updates += 1
        seconds = time.monotonic() - started_s
        self.computed_s += seconds
        if self.outer is not None:
            self.outer.loss, self.outer.computed_s = loss, self.computed_s
        self.record(
            loss=loss, lr=lr, grad_norm=norm, tokens=ids_BT.numel(), tokens_per_s=round(ids_BT.numel() / seconds)
        )
        if time.monotonic() - self.logged_s > LOG_EVERY_S:
            self.logged_s = time.monotonic()
            log.info("step %d of %d: loss %.3f", self.progress.step, self.settings.steps, loss)

    def meet(self) -> None:
        """The sites' part of a step: give and take where a round is due."""
        if self.outer is None:
            return
        place = self.stream.place.to_json() if self.stream.place else None
        step, outcome = self.outer.after(self.progress.step, place, self._reset)
        healed, self.progress.step = step != self.progress.step, step
        if outcome is not None or healed:
            self._record_round(outcome)

    def keep(self) -> None:
        """Every few steps and at the end: measure the held-out loss; write a checkpoint."""
        step, last = self.progress.step, self.progress.step >= self.settings.steps
        if last or step % self.settings.eval_every == 0:
            self.evaluate()
        if last or step - self.kept >= self.settings.checkpoint_every or step < self.kept:
            self.checkpoint()

    def checkpoint(self) -> None:
        if self.outer is not None and self.outer.flight:
            return  # what travels is in no checkpoint; the next step, or the one that lands it, writes one
        self.kept = self.progress.step
        self.progress.place = self.stream.place.to_json() if self.stream.place else None
        self.progress.round = self.outer.site.round if self.outer else 0
        self.progress.tensors = self._state()
        checkpoint.write(self.folder / "checkpoints", self.progress)
        self.progress.tensors = {}

    @torch.no_grad()
    def evaluate(self) -> None:
        """Record the mean loss over the held-out sequences, in nats per token, and its perplexity."""
        if len(self.heldout_ST):
            self.model.eval()
            losses = [self._loss(ids_BT) * len(ids_BT) for ids_BT in self._micro_batches(self.heldout_ST)]
            self.model.train()
            loss = float(torch.stack(losses).sum()) / len(self.heldout_ST)
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
        save_model(self.model, self.tokenizer, temporary)
        for path in [*temporary.iterdir(), temporary]:
            fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        fsync(self.folder)
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
        elapsed_s = time.monotonic() - self.started_s
        self.record(
            round=self.outer.site.round,
            quorum=outcome.kept if outcome else None,
            left_out=outcome.left_out if outcome else None,
            missing=outcome.missing if outcome else None,
            digests=self.outer.site.agreed.digests,
            sent_bytes=self.outer.sent_bytes,
            received_bytes=self.outer.received_bytes,
            computed_s=round(self.computed_s, 3),
            waited_s=round(self.outer.waited_s, 3),
            elapsed_s=round(elapsed_s, 3),
        )

    def _accumulate(self, ids_BT: Tensor) -> float:
        """Add the gradients of the step's mean loss, a micro-batch at a time. Returns the loss."""
        total = 0.0
        for micro_MT in self._micro_batches(ids_BT):
            loss = self._loss(micro_MT) * (len(micro_MT) / len(ids_BT))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _micro_batches(self, ids_BT: Tensor) -> list[Tensor]:
        size = self.settings.micro_batch
        return [ids_BT[at : at + size] for at in range(0, len(ids_BT), size)]

    def _loss(self, ids_BT: Tensor) -> Tensor:
        """Mean over the sequences' tokens but their first."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits
        return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())

    def _optimizer(self) -> torch.optim.AdamW:
        settings = self.settings
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _reset(self) -> None:
        """Begin with new moments."""
        self.optimizer, self.progress.updates = self._optimizer(), 0

    def _state(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": tensor for name, tensor in self.tensors.items()}
        for name, parameter in self.model.named_parameters() if self.progress.updates else ():
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        return tensors | (self.outer.state() if self.outer else {})

    @torch.no_grad()
    def _restore(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            if self.progress.updates:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.progress.updates)),
                    "exp_avg": tensors[f"exp_avg.{name}"].clone(),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].clone(),
                }


def rate(step: int, settings: PretrainSection) -> float:
    """The learning rate of step `step`, from 0: linear warm-up, then half a cosine from `lr` to `final_lr`."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.final_lr + (settings.lr - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


def claim(folder: Path, about: dict[str, str]) -> None:
    """Mark `folder` as this run's. Raises ConfigError if it holds another run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    if not path.exists():
        write_file(path, (json.dumps(about, indent=1) + "\n").encode())
        return
    held = json.loads(path.read_text())
    for key in sorted({*held, *about}):
        if held.get(key) != about.get(key):
            raise ConfigError(
                f"{folder} holds a run with {key} = {held.get(key)}, not {about.get(key)}: restore it to resume that run, "
                "or choose another --out"
            )


def drop_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be repeated, and an incomplete last line."""
    if path.exists():
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_file(path, "".join(line for line in whole if step and json.loads(line)["step"] <= step).encode())
