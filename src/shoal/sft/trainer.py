"""Supervised fine-tuning: next-token training on conversations, loss on what the assistant wrote.

The same policy, packing and checkpoints as reinforcement learning, so that what this leaves is what a run begins with.
One update's loss is the mean over all trained tokens of its conversations, one denominator over its micro-batches.
Invariant: which conversations an update sees is a pure function of seed, epoch and data, so the number of updates done is
all there is to remember, and a resumed run equals the uninterrupted one (bitwise on the CPU).
Called by `shoal sft`. Left out: several devices, learning rates that decay, LoRA.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config import Config, ConfigError
from shoal.config.recipe import LossSection
from shoal.files import fsync
from shoal.learner.checkpoint import Checkpoints, Progress
from shoal.learner.policy import Policy
from shoal.model.dtype import DtypeName
from shoal.model.load import save_model
from shoal.sft.batch import Data, MicroBatch, fingerprint, micro_batches, plan
from shoal.sft.chat import Example

SAY_EVERY_S = 1.0  # of training steps; every one is in metrics.jsonl

log = logging.getLogger(__name__)


class Sft:
    def __init__(self, policy: Policy, data: Data, config: Config, folder: Path) -> None:
        self.policy = policy
        self.data = data
        self.config = config
        self.folder = folder
        self.checkpoints = Checkpoints(folder / "checkpoints", policy)
        self.said_s = 0.0  # when a training step was last put in the log
        self.plan = plan([len(example.tokens) for example in data.train], config.sft, config.run.seed)

    def run(self, stop: threading.Event) -> Path | None:
        """Train to the last epoch's end, or until `stop`. Returns the model's folder, or None where it was stopped."""
        same_run(self.folder, fingerprint(self.data, self.config))
        step = self.checkpoints.restore().step
        _forget_after(self.metrics, step)
        if step:
            log.info("goes on after step %d of %d", step, len(self.plan))
        else:
            self.evaluate(0)
        while step < len(self.plan):
            if stop.is_set():
                self.remember(step, last=True)
                self.checkpoints.finish()
                return None
            self.train(step)
            step += 1
            self.remember(step, last=step == len(self.plan))
        self.checkpoints.finish()
        return self.publish()

    def train(self, step: int) -> None:
        """One update, and its figures."""
        started_s = time.monotonic()
        epoch, members = self.plan[step]
        examples = [self.data.train[i] for i in members]
        told = self.policy.step(self._mean_loss(examples), self._micro_batches(examples))
        seconds = time.monotonic() - started_s
        n_tokens = sum(len(example.tokens) for example in examples)
        figures = {
            "step": step + 1,
            "epoch": epoch,
            "loss": told["loss"],
            "grad_norm": told["optim/grad_norm"],
            "lr": told["optim/lr"],
            "conversations": len(examples),
            "trained_tokens": sum(example.n_trained for example in examples),
            "tokens": n_tokens,
            "tokens_per_s": round(n_tokens / seconds, 1),
        }
        self.note(figures)
        if time.monotonic() - self.said_s > SAY_EVERY_S:
            self.said_s = time.monotonic()
            self.say(step + 1, f"loss {told['loss']:.3f}, {n_tokens / seconds:.0f} tokens/s")

    def evaluate(self, step: int) -> None:
        """The mean loss over all trained tokens of the conversations held out."""
        if self.data.heldout:
            loss = self._mean_loss(self.data.heldout)
            with torch.no_grad():
                total = sum(float(loss(micro)) for micro in self._micro_batches(self.data.heldout))
            self.note({"step": step, "heldout_loss": total})
            self.say(step, f"held-out loss {total:.3f}")

    def remember(self, step: int, *, last: bool) -> None:
        """Keep a checkpoint each few steps and at the end, and say how far it has come."""
        every = self.config.sft.checkpoint_every
        if last or (every and step % every == 0):
            self.evaluate(step)
            if every:
                self.checkpoints.begin(Progress(step=step))

    def publish(self) -> Path:
        """Write the model as a Hugging Face folder, whole or not at all. Returns it."""
        final, temporary = self.folder / "model", self.folder / ".model"
        shutil.rmtree(temporary, ignore_errors=True)
        _stop_at(self.policy.model, self.data.ends)
        policy = self.policy
        save_model(policy.model, policy.tokenizer, temporary, policy.published(), policy.stored)
        for path in [*temporary.iterdir(), temporary]:
            fsync(path)
        shutil.rmtree(final, ignore_errors=True)  # of a run with fewer epochs
        temporary.rename(final)
        fsync(self.folder)
        return final

    def note(self, figures: dict[str, float]) -> None:
        """One line of metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(figures) + "\n")

    def say(self, step: int, words: str) -> None:
        log.info("step %d of %d: %s", step, len(self.plan), words)

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _mean_loss(self, examples: Sequence[Example]) -> Any:
        """The loss of one micro-batch of `examples`; over all of them it adds up to the mean, in nats a token."""
        n_trained = sum(example.n_trained for example in examples)

        def loss(micro: MicroBatch) -> Tensor:
            logprobs_N, _ = self.policy.logprobs(micro.pack, with_entropy=False)
            return -logprobs_N[micro.trained_N.to(logprobs_N.device)].sum() / n_trained

        return loss

    def _micro_batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        return micro_batches(examples, row_tokens=self.config.sft.max_tokens)


def open_policy(folder: Path, config: Config, dtype: DtypeName) -> Policy:
    """The model in `folder` with the optimizer that `[sft]` describes; betas and weight decay are the learner's."""
    settings = config.sft
    section = config.learner.model_copy(
        update={
            "lr": settings.lr,
            "warmup_steps": settings.warmup_steps,
            "grad_clip": settings.grad_clip,
            "loss": LossSection(beta=0.0, entropy=0.0),
        }
    )
    return Policy(folder, section, dtype, config.model.device, 1.0)


def same_run(folder: Path, found: str) -> None:
    """Make `folder` this run's, or see that it is. Raises ConfigError where it holds another."""
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / "run.json", folder / ".run.json"
    if not path.exists():
        temporary.write_text(json.dumps({"fingerprint": found}) + "\n")
        fsync(temporary)
        temporary.rename(path)
    elif json.loads(path.read_text())["fingerprint"] != found:
        raise ConfigError(
            f"{folder} holds a run with another model, seed, batch or data (sft.max_tokens and sft.eval_frac change the"
            " data): set these back to go on with it, or choose another --out"
        )


def _forget_after(path: Path, step: int) -> None:
    """Drop the figures of updates that are done again, and a line that was cut off."""
    if path.exists():
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if step and json.loads(line)["step"] <= step]
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(kept))
        temporary.rename(path)


def _stop_at(model: Any, ends: set[int]) -> None:
    """Declare in the model's generation config that these tokens, which it was trained to end with, end a completion."""
    declared = model.generation_config.eos_token_id
    known = declared if isinstance(declared, list) else [declared] if declared is not None else []
    if ends - set(known):
        model.generation_config.eos_token_id = [*known, *sorted(ends - set(known))]
