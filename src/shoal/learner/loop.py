"""The learner's loop: wait for a full batch, train, publish, remember. Nothing here waits for a worker or a relay.

Publishing is writing a folder; the origin picks it up, and workers go on with the version they have meanwhile.
Invariant: policy version v is the state after steps 0..v-1, and a version, once published, is never another.
Called by `shoal learner`; under torchrun every rank runs it, and the leader alone talks to the pool.
Papers: PRIME-RL in INTELLECT-2 (arXiv 2505.07291, section 2).
"""

import shutil
import threading
import time
from pathlib import Path

from blake3 import blake3

from shoal.config import Config
from shoal.learner import lora, metrics
from shoal.learner.batch import micro_batches, teaching
from shoal.learner.checkpoint import Checkpoints, Progress
from shoal.learner.groups import Fetched, Group, decode, encode, fetch
from shoal.learner.loss import denominator
from shoal.learner.policy import Policy
from shoal.model.dtype import measure_gflops
from shoal.model.load import WEIGHTS, save_model
from shoal.protocol.messages import Batch, Ok, StepReport
from shoal.protocol.node import Node
from shoal.shardcast.format.names import version_name

IDLE_S = 0.1


class Learner:
    """`node` is the leader's way to the pool; None on the other ranks."""

    def __init__(self, node: Node | None, config: Config, policy: Policy, folder: Path) -> None:
        self.node = node
        self.config = config
        self.policy = policy
        self.ranks = policy.ranks
        self.folder = folder
        self.versions = folder / "versions"
        self.checkpoints = Checkpoints(folder / "checkpoints", policy)
        self.shape = metrics.shape_of(policy.model)
        self.peak_gflops = measure_gflops(policy.compute, str(policy.device))

    def run(self, stop: threading.Event) -> str:
        """Train to the last step, or until `stop`. Returns which."""
        progress = self.checkpoints.restore()
        self.publish(progress)
        while progress.step < self.config.run.steps:
            batch, waited_s = self.wait_for_batch(progress.step, stop)
            started_s = time.monotonic()
            fetched = self.share(batch)
            if fetched is None:
                self.checkpoints.finish()
                return "stopped"
            told = self.train(fetched.groups)
            progress.step += 1
            progress.trained += dict.fromkeys(group.submission for group in fetched.groups)
            told |= self.publish(progress)
            self.remember(progress)
            self.report(progress.step - 1, fetched, told, time.monotonic() - started_s, waited_s)
        self.checkpoints.finish()
        return "finished"

    def wait_for_batch(self, step: int, stop: threading.Event) -> tuple[Batch | None, float]:
        """The step's groups once enough are accepted, and the seconds waited. None where `stop` came first."""
        if self.node is None:
            return None, 0.0
        self.node.doing(f"step {step}'s batch", waiting=True)
        started_s = time.monotonic()
        while not stop.is_set():
            batch = self.node.get(f"/v1/batches/{step}", Batch)
            if batch.ready:
                self.node.doing(f"training step {step}")
                return batch, time.monotonic() - started_s
            stop.wait(IDLE_S)
        return None, 0.0

    def share(self, batch: Batch | None) -> Fetched | None:
        """The batch's groups, downloaded by the leader, on every rank. None where the leader stops."""
        if self.node is None:
            message = self.ranks.tell(None)
            return Fetched(decode(message), 0, 0) if message else None
        fetched = None
        try:
            if batch is not None:
                fetched = fetch(self.node, batch, self.config, self.folder / "quarantine")
            return fetched
        finally:  # the other ranks wait to be told, also where this raises
            if self.ranks.size > 1:
                self.ranks.tell(b"" if fetched is None else encode(fetched.groups))

    def train(self, groups: list[Group]) -> dict[str, float]:
        """The step's optimizer updates, each over an equal share of the groups. Returns the step's metrics of training."""
        started_s = time.monotonic()
        settings = self.config.learner
        updates = min(settings.optimizer_steps_per_step, len(groups))
        shares = [groups[update::updates] for update in range(updates)]
        packed = [
            micro_batches(
                teaching(share, settings.loss),
                row_tokens=settings.row_tokens,
                normalize_std=settings.loss.normalize_std,
            )
            for share in shares
        ]
        if settings.behaviour_logprobs == "recomputed":
            packed = [self.policy.recompute_behaviour(rows) for rows in packed]
        told = []
        for share, rows in zip(shares, packed, strict=True):
            n_tokens = sum(group.n_tokens for group in share)
            n_rollouts = sum(len(group.completions) for group in share)
            over = denominator(settings.loss.kind, n_tokens, n_rollouts, self.config.sampling.max_tokens)
            computed = sum(len(micro.advantage_N) for micro in rows)
            told.append((computed, self.policy.update(rows, over)))
        return metrics.update_metrics(told) | {"perf/train_s": time.monotonic() - started_s}

    def publish(self, progress: Progress) -> dict[str, float]:
        """Write the policy's version for the origin to pick up. Returns what it cost."""
        started_s = time.monotonic()
        version = progress.step
        final = self.versions / version_name(version)
        temporary = final.with_name(f".{final.name}")
        published = self.policy.published() if not final.exists() else iter(())
        if self.ranks.leads and not final.exists():
            shutil.rmtree(temporary, ignore_errors=True)
            save_model(self.policy.model, self.policy.tokenizer, temporary, published, self.policy.stored)
            temporary.rename(final)
        for _ in published:  # the other ranks gather with the leader
            pass
        section = self.config.learner.lora
        adapters = lora.adapters(self.policy.model) if section else {}
        if self.node is None:
            return {}
        if section is not None:
            lora.save(adapters, section, self.folder / "adapter")
        progress.version_digest = blake3(max_threads=blake3.AUTO).update_mmap(final / WEIGHTS).hexdigest()
        self.node.policy_version = version
        for old in sorted(self.versions.glob("v*"))[: -self.config.learner.keep_versions]:
            shutil.rmtree(old)
        return metrics.sync_metrics(final, time.monotonic() - started_s)

    def remember(self, progress: Progress) -> None:
        """Begin a checkpoint each few steps and at the end."""
        if progress.step % self.config.learner.checkpoint_every == 0 or progress.step == self.config.run.steps:
            self.checkpoints.begin(progress)

    def report(self, step: int, fetched: Fetched, told: dict[str, float], busy_s: float, waiting_s: float) -> None:
        if self.node is None:
            return
        groups, settings = fetched.groups, self.config.learner
        passes = (settings.loss.beta > 0) + (settings.behaviour_logprobs == "recomputed")
        told |= metrics.reward_metrics(groups)
        told |= metrics.completion_metrics(groups, max_tokens=self.config.sampling.max_tokens)
        told |= metrics.age_metrics(groups, step, refused=fetched.refused)
        told |= {"data/quarantined": float(fetched.quarantined)}
        told |= metrics.speed_metrics(
            n_tokens=sum(group.n_tokens for group in groups),
            flops=metrics.training_flops(self.shape, teaching(groups, settings.loss), extra_forwards=passes)
            / self.ranks.size,
            train_s=told.pop("perf/train_s"),
            busy_s=busy_s,
            waiting_s=waiting_s,
            peak_gflops=self.peak_gflops,
        )
        told |= metrics.memory_metrics(str(self.policy.device))
        trained = [group.submission for group in groups]
        self.node.post("/v1/steps", StepReport(step=step, metrics=told, trained=trained), Ok)
