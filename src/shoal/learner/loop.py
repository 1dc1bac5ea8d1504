"""The learner's loop: wait for a full batch, train, remember, publish. Nothing here waits for a worker or a relay.

Publishing is writing a folder; the origin picks it up, and workers go on with the version they have meanwhile.
Invariant: policy version v is the state after steps 0..v-1, and a version, once published, is never another.
Called by `shoal learner`. Papers: PRIME-RL in INTELLECT-2 (arXiv 2505.07291, section 2).
"""

import shutil
import threading
import time
from pathlib import Path

from shoal.config import Config
from shoal.learner import checkpoint
from shoal.learner.batch import Group, fetch, micro_batches
from shoal.learner.policy import Policy
from shoal.messages import Batch, Ok, StepReport
from shoal.model.load import save_model
from shoal.node import Node

IDLE_S = 0.1


class Learner:
    def __init__(self, node: Node, config: Config, policy: Policy, folder: Path) -> None:
        self.node = node
        self.config = config
        self.policy = policy
        self.checkpoints = folder / "checkpoints"
        self.versions = folder / "versions"

    def run(self, stop: threading.Event) -> str:
        """Train to the last step, or until `stop`. Returns which."""
        step = checkpoint.restore(self.policy, self.checkpoints)
        self.publish(step)
        while step < self.config.run.steps:
            batch, waited_s = self.wait_for_batch(step, stop)
            if batch is None:
                return "stopped"
            started_s = time.monotonic()
            groups, refused = fetch(self.node, batch, self.config)
            metrics = self.train(groups)
            step += 1
            metrics["sync/seconds"] = self.publish(step)
            self.remember(step)
            busy_s = time.monotonic() - started_s
            self.report(step - 1, groups, metrics | {"perf/busy_s": busy_s, "perf/waiting_s": waited_s}, refused)
        return "finished"

    def wait_for_batch(self, step: int, stop: threading.Event) -> tuple[Batch | None, float]:
        """The step's groups once enough are accepted, and the seconds waited. None where `stop` came first."""
        self.node.doing(f"step {step}'s batch", waiting=True)
        started_s = time.monotonic()
        while not stop.is_set():
            batch = self.node.get(f"/v1/batches/{step}", Batch)
            if batch.ready:
                self.node.doing(f"training step {step}")
                return batch, time.monotonic() - started_s
            stop.wait(IDLE_S)
        return None, 0.0

    def train(self, groups: list[Group]) -> dict[str, float]:
        """The step's optimizer updates, each over an equal share of the groups. Returns metrics per trained token."""
        settings = self.config.learner
        updates = min(settings.optimizer_steps_per_step, len(groups))
        totals: dict[str, float] = {}
        for update in range(updates):
            share = groups[update::updates]
            n_tokens = sum(group.n_tokens for group in share)
            packed = micro_batches(
                share,
                row_tokens=settings.row_tokens,
                rows_per_microbatch=settings.rows_per_microbatch,
                normalize_std=settings.loss.normalize_std,
            )
            for name, value in self.policy.update(packed, n_tokens).items():
                totals[name] = totals.get(name, 0.0) + value
        n_tokens = sum(group.n_tokens for group in groups)
        return {
            name: value / (n_tokens if name.startswith("policy/") else updates) for name, value in totals.items()
        } | {"perf/tokens": float(n_tokens)}

    def publish(self, version: int) -> float:
        """Write version `version` for the origin to pick up. Returns the seconds it took."""
        started_s = time.monotonic()
        final = self.versions / f"v{version:06d}"
        if not final.exists():
            temporary = self.versions / f".v{version:06d}"
            shutil.rmtree(temporary, ignore_errors=True)
            save_model(self.policy.model, self.policy.tokenizer, temporary)
            temporary.rename(final)
        self.node.policy_version = version
        for old in sorted(self.versions.glob("v*"))[: -self.config.learner.keep_versions]:
            shutil.rmtree(old)
        return time.monotonic() - started_s

    def remember(self, step: int) -> None:
        """Keep a checkpoint each few steps and at the end."""
        if step % self.config.learner.checkpoint_every == 0 or step == self.config.run.steps:
            checkpoint.save(self.policy, step, self.checkpoints)

    def report(self, step: int, groups: list[Group], metrics: dict[str, float], refused: int) -> None:
        ages = [step - group.policy_version for group in groups]
        lengths = [len(completion) for group in groups for completion in group.completions]
        rewards = [reward for group in groups for reward in group.rewards]
        cut = sum(length == self.config.sampling.max_tokens for length in lengths)
        metrics |= {
            "reward/batch_mean": sum(rewards) / len(rewards),
            "async/staleness_mean": sum(ages) / len(ages),
            "async/staleness_max": float(max(ages)),
            "async/refused": float(refused),
            "completion/length_mean": sum(lengths) / len(lengths),
            "completion/truncated_frac": cut / len(lengths),
        }
        trained = [group.submission for group in groups]
        self.node.post("/v1/steps", StepReport(step=step, metrics=metrics, trained=trained), Ok)
