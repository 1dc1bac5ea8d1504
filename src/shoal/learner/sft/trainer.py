"""Supervised fine-tuning: next-token training on conversations, with loss on what the assistant wrote.

It uses the policy, packing and checkpoints of reinforcement learning, so a run can start from its result. One update's
loss is the mean over all trained tokens of its conversations, with one denominator for all its micro-batches.
Invariant: the conversations of an update are a pure function of seed, epoch and data. So the position in the data is the
number of updates done, and a resumed run equals the uninterrupted one (bitwise on the CPU).
Called by `shoal sft`, under torchrun on every rank: each computes its share of an update's micro-batches, and the leader
writes the files. Left out: learning rates that decay, LoRA.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.config import Config
from shoal.config.recipe import LossSection
from shoal.files import commit_folder
from shoal.learner.checkpoint import Checkpoints, Progress
from shoal.learner.folder import claim, drop_after
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.sft.batch import Data, MicroBatch, fingerprint, micro_batches, plan
from shoal.learner.sft.chat import Example
from shoal.learner.started import from_leader
from shoal.model.dtype import DtypeName
from shoal.model.load import save_model

DIFFERS = "another model, seed, batch or data (sft.max_tokens and sft.eval_frac change the data)"
GRAD_CLIP = 1.0  # largest gradient norm; larger gradients are scaled down
LOG_EVERY_S = 1.0  # at most one training step per second is logged; metrics.jsonl has all

log = logging.getLogger(__name__)


class Sft:
    def __init__(self, policy: Policy, data: Data, config: Config, folder: Path) -> None:
        self.policy, self.ranks = policy, policy.ranks
        self.data = data
        self.config = config
        self.folder = folder
        self.checkpoints = Checkpoints(folder / "checkpoints", policy)
        self.logged_s = 0.0  # time of the last logged training step
        self.plan = plan([len(example.tokens) for example in data.train], config.sft, config.run.seed)

    def run(self, stop: threading.Event) -> Path | None:
        """Train to the end of the last epoch, or until `stop`. Returns the model's folder, or None if stopped."""
        self.claim()
        step = self.checkpoints.restore().step
        self.drop_after(step)
        if step:
            log.info("resuming after step %d of %d", step, len(self.plan))
        else:
            self.evaluate(0)
        while step < len(self.plan):
            if self.stops(stop):
                self.checkpoint(step, last=True)
                self.checkpoints.finish()
                return None
            self.train(step)
            step += 1
            self.checkpoint(step, last=step == len(self.plan))
        self.checkpoints.finish()
        return self.publish()

    def train(self, step: int) -> float:
        """Make one update and record its metrics. Returns its loss."""
        started_s = time.monotonic()
        epoch, members = self.plan[step]
        examples = [self.data.train[i] for i in members]
        update = self.policy.step(self._mean_loss(examples), self._micro_batches(examples))
        seconds = time.monotonic() - started_s
        n_tokens = sum(len(example.tokens) for example in examples)
        figures = {
            "step": step + 1,
            "epoch": epoch,
            "loss": update["loss"],
            "grad_norm": update["optim/grad_norm"],
            "lr": update["optim/lr"],
            "conversations": len(examples),
            "trained_tokens": sum(example.n_trained for example in examples),
            "tokens": n_tokens,
            "tokens_per_s": round(n_tokens / seconds, 1),
        }
        self.record(figures)
        if time.monotonic() - self.logged_s > LOG_EVERY_S:
            self.logged_s = time.monotonic()
            self.log(step + 1, f"loss {update['loss']:.3f}, {n_tokens / seconds:.0f} tokens/s")
        return update["loss"]

    def evaluate(self, step: int) -> None:
        """Record the mean loss over all trained tokens of the held-out conversations."""
        if self.data.heldout:
            loss = self._mean_loss(self.data.heldout)
            total = self.policy.total(loss, self._micro_batches(self.data.heldout))
            self.record({"step": step, "heldout_loss": total})
            self.log(step, f"held-out loss {total:.3f}")

    def checkpoint(self, step: int, *, last: bool) -> None:
        """Every few steps and at the end: measure the held-out loss and begin to write a checkpoint."""
        every = self.config.sft.checkpoint_every
        if last or (every and step % every == 0):
            self.evaluate(step)
            if every:
                self.checkpoints.begin(Progress(step=step))

    def publish(self) -> Path:
        """Write the model as a Hugging Face folder, which appears whole or not at all. Returns it."""
        final, temporary = self.folder / "model", self.folder / ".model"
        policy, tensors = self.policy, self.policy.published()
        if self.ranks.leads:
            shutil.rmtree(temporary, ignore_errors=True)
            _declare_ends(policy.model, self.data.ends)
            save_model(policy.model, policy.tokenizer, temporary, tensors, policy.stored)
            shutil.rmtree(final, ignore_errors=True)  # from a run with fewer epochs
            commit_folder(temporary, final)
        for _ in tensors:  # the other ranks take part in gathering each tensor
            pass
        return final

    def claim(self) -> None:
        """Mark the folder as this run's. Raises ConfigError if it holds another run; LeaderError on the other ranks."""
        from_leader(
            self.ranks,
            lambda: claim(self.folder, {"fingerprint": fingerprint(self.data, self.config)}, DIFFERS),
            lambda _: b"",
            lambda _: None,
        )

    def stops(self, stop: threading.Event) -> bool:
        """Whether the leader was told to stop, on every rank."""
        return bool(self.ranks.broadcast((b"stop" if stop.is_set() else b"") if self.ranks.leads else None))

    def drop_after(self, step: int) -> None:
        if self.ranks.leads:
            drop_after(self.metrics, step)

    def record(self, figures: dict[str, float]) -> None:
        """Append one line to metrics.jsonl."""
        if self.ranks.leads:
            with self.metrics.open("a") as file:
                file.write(json.dumps(figures) + "\n")

    def log(self, step: int, text: str) -> None:
        if self.ranks.leads:
            log.info("step %d of %d: %s", step, len(self.plan), text)

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _mean_loss(self, examples: Sequence[Example]) -> Any:
        """The loss of one micro-batch of `examples`. Over all micro-batches it adds up to the mean, in nats per token."""
        n_trained = sum(example.n_trained for example in examples)

        def loss(micro: MicroBatch) -> Tensor:
            trained_N = micro.trained_N.to(self.policy.device)

            def loss_of(targets: slice, logp_C: Tensor, _: Tensor | None) -> Tensor:
                return -logp_C[trained_N[targets]].sum() / n_trained

            return self.policy.summed(micro.pack, loss_of)

        return loss

    def _micro_batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        return micro_batches(examples, row_tokens=self.config.sft.max_tokens, packs=self.policy.packs)


def open_policy(folder: Path, config: Config, dtype: DtypeName, ranks: Ranks | None = None) -> Policy:
    """The model in `folder` with the optimizer of `[sft]`. Betas and weight decay are the learner's."""
    settings = config.sft
    section = config.learner.model_copy(
        update={
            "lr": settings.lr,
            "warmup_steps": settings.warmup_steps,
            "schedule": "constant",
            "grad_clip": GRAD_CLIP,
            "loss": LossSection(beta=0.0, entropy=0.0),
        }
    )
    return Policy(folder, section, dtype, config.model.device, 1.0, ranks)


def _declare_ends(model: Any, ends: set[int]) -> None:
    """Add the tokens that ended its training turns to the model's generation config as ends of a completion."""
    declared = model.generation_config.eos_token_id
    known = declared if isinstance(declared, list) else [declared] if declared is not None else []
    if ends - set(known):
        model.generation_config.eos_token_id = [*known, *sorted(ends - set(known))]
