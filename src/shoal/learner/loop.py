"""The learner's loop: gather a batch, train, publish, checkpoint, report. It never waits for one worker or relay.

Publishing writes a folder, which the origin picks up. Meanwhile workers continue with the version they have.
Invariant: policy version v is the state after steps 0..v-1, and a published version never changes.
Called by `shoal learner`. Under torchrun every rank runs this loop, and only the leader talks to the pool.
Paper: PRIME-RL in INTELLECT-2 (arXiv 2505.07291, section 2).
"""

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from shoal.config import Config
from shoal.errors import ShoalError
from shoal.files import commit_folder, copy_tree
from shoal.learner import lora, metrics
from shoal.learner.batch import teaching
from shoal.learner.checkpoint import Checkpoints, Progress
from shoal.learner.group import Known
from shoal.learner.groups import Fetched, Group
from shoal.learner.guard import MAX_SKIPS
from shoal.learner.incoming import Incoming, Prefetch
from shoal.learner.policy import Policy
from shoal.learner.record import sign_folder, signed_record
from shoal.learner.share import Share, can_compute, compute_early
from shoal.model.dtype import measure_gflops
from shoal.model.load import WEIGHTS, save_model
from shoal.protocol.messages import Ok, StepReport
from shoal.protocol.node import Node
from shoal.shardcast.manifest import version_name

MODEL = "model"  # folder of the trained model, once the run has finished

log = logging.getLogger(__name__)


class EmptyBatchError(ShoalError):
    """Several batches in a row held nothing to train on."""


class Learner:
    """`node` is the leader's connection to the pool, and None on the other ranks."""

    def __init__(self, node: Node | None, config: Config, policy: Policy, folder: Path) -> None:
        self.node = node
        self.config = config
        self.policy = policy
        self.ranks = policy.ranks
        self.folder = folder
        self.versions = folder / "versions"
        self.checkpoints = Checkpoints(folder / "checkpoints", policy, self.sign)
        self.prefetch: Prefetch | None = None  # of the next step's groups
        self.shape = metrics.shape_of(policy.model)
        self.peak_gflops = measure_gflops(policy.compute, str(policy.device))

    def run(self, stop: threading.Event) -> str:
        """Train until the last step or until `stop`. Returns "finished" or "stopped"."""
        progress = self.checkpoints.restore()
        self.publish(progress)
        while progress.step < self.config.run.steps:
            started_s = time.monotonic()
            shares = self.shares()
            batch = self.batch(progress.step, shares, stop)
            if batch is None:
                self.checkpoints.finish()
                return "stopped"
            self.prefetch_after(progress.step)
            figures = self.train(batch.groups, *shares) if batch.groups else self.skip(progress.step, batch.fetched)
            before = progress.version_digest
            progress.advance(group.submission for group in batch.groups)
            figures |= self.publish(progress)
            self.checkpoint(progress)
            busy_s = time.monotonic() - started_s - batch.waited_s
            self.report(progress, before, batch.fetched, figures, busy_s, batch.waited_s)
        self.checkpoints.finish()
        self.leave_model(progress)
        return "finished"

    def shares(self) -> list[Share]:
        """The shares of a step's updates, empty."""
        return [Share(self.config, self.policy) for _ in range(self.config.learner.optimizer_steps_per_step)]

    def batch(self, step: int, shares: Sequence[Share], stop: threading.Event) -> Incoming | None:
        """The step's batch once it is full, on every rank; None if `stop` comes first.

        Meanwhile the rows of the `shares` are computed as far as possible, as soon as they are closed.
        """
        incoming = Incoming(step, self.node, self.ranks, self.config, self.folder / "quarantine", self.prefetch)
        while incoming.more(stop, at_once=can_compute(shares)):
            if incoming.full:
                return incoming
            for number, share in enumerate(shares):
                share.take(incoming.groups[number :: len(shares)])
            compute_early(shares)
        return None

    def prefetch_after(self, step: int) -> None:
        """Begin to fetch the groups of the step after this one."""
        if self.node is not None and step + 1 < self.config.run.steps:
            self.prefetch = Prefetch(step + 1, self.node, self.config, self.folder / "quarantine")
            self.prefetch.start()

    def train(self, groups: Sequence[Known], *begun: Share) -> dict[str, float]:
        """Make the step's optimizer updates, each on an equal share of the groups. Returns the metrics of training.

        `begun`: the first shares, as far as their rows are computed.
        """
        started_s = time.monotonic()
        early_s = sum(share.seconds for share in begun)
        n_updates = min(self.config.learner.optimizer_steps_per_step, len(groups))
        shares = [*begun, *self.shares()[len(begun) :]][:n_updates]
        for number, share in enumerate(shares):
            share.take(groups[number::n_updates])
            share.close()
        early = shares[0].n_computed
        for share in shares[1:]:
            share.fix_behaviour()
        figures = [share.update() for share in shares]
        computed = [share.n_computed for share in shares]
        return metrics.update_metrics([*zip(computed, figures, strict=True)]) | {
            "perf/train_s": early_s + time.monotonic() - started_s,
            "perf/early_frac": early / max(1, sum(computed)),
        }

    def skip(self, step: int, fetched: Fetched) -> dict[str, float]:
        """A step whose batch holds nothing to train on: the next version has the same weights.

        Raises EmptyBatchError once MAX_SKIPS steps in a row were skipped.
        """
        skipped = self.policy.skipped_in_row
        if skipped >= MAX_SKIPS:
            self.checkpoints.finish()  # a restart stops here, too
            raise EmptyBatchError(
                f"step {step}: no group is left to train on; {fetched.left_out} (see the log). The {skipped} steps or "
                "updates before it were skipped, as many as may be: look for a broken validator or coordinator"
            )
        self.policy.forget()
        log.error("step %d is skipped: no group is left to train on; %s", step, fetched.left_out)
        self.policy.skipped_in_row += 1
        return {"optim/skipped": 1.0}

    def publish(self, progress: Progress) -> dict[str, float]:
        """Write the current version for the origin, unless it is published already. Returns size and seconds."""
        started_s = time.monotonic()
        final = self.versions / version_name(progress.step)
        tensors = iter(()) if final.exists() else self.policy.published()
        if self.ranks.leads and not final.exists():
            temporary = final.with_name(f".{final.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            save_model(self.policy.model, self.policy.tokenizer, temporary, tensors, self.policy.stored)
            commit_folder(temporary, final)
        for _ in tensors:  # the other ranks take part in gathering each tensor
            pass
        section = self.config.learner.lora
        adapters = lora.adapters(self.policy.model, self.ranks) if section else {}
        if self.node is None:
            return {}
        if section is not None:
            lora.save(adapters, section, self.config.model.name, self.folder / "adapter")
        progress.version_digest = blake3(max_threads=blake3.AUTO).update_mmap(final / WEIGHTS).hexdigest()
        self.node.policy_version = progress.step
        log.info("version %d is written to %s", progress.step, final)
        for old in sorted(self.versions.glob("v*"))[: -self.config.learner.keep_versions]:
            shutil.rmtree(old)
        return metrics.sync_metrics(final, time.monotonic() - started_s)

    def leave_model(self, progress: Progress) -> None:
        """Leave the last version where the user looks for it: a plain model, adapters merged."""
        if self.node is None:
            return
        model = self.folder / MODEL
        temporary = model.with_name(f".{MODEL}")
        shutil.rmtree(temporary, ignore_errors=True)
        version = self.versions / version_name(progress.step)
        if self.config.learner.lora is None:
            copy_tree(version, temporary)
        else:
            lora.merge(version, temporary)
        shutil.rmtree(model, ignore_errors=True)  # of an earlier run with fewer steps
        commit_folder(temporary, model)
        log.info("finished %d steps; the trained model is in %s", progress.step, model)

    def checkpoint(self, progress: Progress) -> None:
        """Begin to write a checkpoint every few steps and after the last one."""
        if progress.step % self.checkpoints.every == 0 or progress.step == self.config.run.steps:
            self.checkpoints.begin(progress)

    def sign(self, folder: Path, step: int, files: dict[str, str]) -> None:
        """Sign the checkpoint in `folder`, of the state before `step`."""
        if self.node is not None:
            sign_folder(self.node, folder, step, files)

    def report(
        self,
        progress: Progress,
        before: str,
        fetched: Fetched,
        figures: dict[str, float],
        busy_s: float,
        waiting_s: float,
    ) -> None:
        """Post the step's metrics and what it trained on; `before`: digest of the weights that the step began with."""
        if self.node is None:
            return
        step = progress.step - 1
        figures |= metrics.batch_metrics(fetched, step, max_tokens=self.config.sampling.max_tokens)
        if fetched.groups:
            figures |= metrics.speed_metrics(
                n_tokens=sum(group.n_tokens for group in fetched.groups),
                flops=self._flops(fetched.groups) / self.ranks.size,
                train_s=figures.pop("perf/train_s"),
                busy_s=busy_s,
                waiting_s=waiting_s,
                peak_gflops=self.peak_gflops,
            )
        figures |= metrics.memory_metrics(str(self.policy.device))
        trained = [group.submission for group in fetched.groups]
        record = signed_record(self.node, step, fetched, before, progress.version_digest, self.policy)
        report = StepReport(step=step, metrics=metrics.finite(figures), trained=trained, record=record)
        self.node.post("/v1/steps", report, Ok)
        log.info(
            "step %d trained: %d groups, reward %.3f, busy %.1f s, waiting %.1f s",
            step + 1,
            len(fetched.groups),
            figures.get("reward/batch_mean", 0.0),
            busy_s,
            waiting_s,
        )

    def _flops(self, groups: list[Group]) -> float:
        settings = self.config.learner
        passes = (settings.loss.beta > 0) + (settings.behaviour_logprobs == "recomputed")
        return metrics.training_flops(self.shape, teaching(groups, settings.loss), extra_forwards=passes)
