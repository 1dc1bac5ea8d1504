"""The learner's loop: wait for a batch, train, publish, checkpoint, report. It waits for no single worker or relay.

Publishing writes `versions/vN`. The origin (`cli/origin_and_relay`) watches that folder and serves new versions.
Workers download them through relays (`worker/loop`), and generate with their older version until then.
Invariant: policy version v is the state after steps 0..v-1, and a published version never changes.
Under torchrun every rank runs this loop, and only the leader talks to the pool.
Paper: PRIME-RL in INTELLECT-2 (arXiv 2505.07291, section 2).
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.errors import ShoalError
from shoal.files import commit_folder, copy_tree, discard, file_digest, remove_leftovers
from shoal.learner import report, updates
from shoal.learner.batch import with_gradient
from shoal.learner.checkpoint import Checkpoints, LearnerProgress
from shoal.learner.groups import AnyGroup, Fetched, Group, IncomingBatches
from shoal.learner.masters import merge_adapters, write_adapter
from shoal.learner.policy import Policy
from shoal.model.dtype import measure_gflops
from shoal.model.load import WEIGHTS
from shoal.protocol.messages import Ok, StepReport
from shoal.protocol.node import Node
from shoal.shardcast.manifest import version_name

MODEL = "model"  # folder of the trained model, written when the run finishes
MAX_SKIPS = 3  # maximum number of steps skipped in a row; one more ends the run
ADAPTER = "adapter"  # folder of the adapters alone, for peft

log = logging.getLogger(__name__)


class Learner:
    """`node` is the leader's connection to the pool, and None on the other ranks."""

    def __init__(self, node: Node | None, config: Config, policy: Policy, folder: Path) -> None:
        self.node = node
        self.config = config
        self.policy = policy
        self.ranks = policy.ranks
        self.folder = folder
        self.versions = folder / "versions"
        self.incoming = IncomingBatches(node, self.ranks, config, folder / "quarantine")
        self.checkpoints = Checkpoints(folder / "checkpoints", policy, self.sign)
        self.shape = report.shape_of(policy.model)
        self.peak_gflops = measure_gflops(policy.compute, str(policy.device))

    def run(self, stop: threading.Event) -> str:
        """Train until the last step or until `stop`. Return "finished" or "stopped"."""
        progress = self.checkpoints.restore()
        self.publish(progress)
        while progress.step < self.config.run.steps:
            batch = self.incoming.wait(progress.step, stop)
            if batch is None:
                self.checkpoints.finish()
                return "stopped"
            self.incoming.prefetch(progress.step + 1)
            before = progress.version_digest
            figures = self.compute(progress, batch.groups, batch.fetched)
            progress.advance(group.submission for group in batch.groups)
            figures |= self.publish(progress)  # workers get the new weights
            self.checkpoint(progress)
            self.report(progress, before, batch.fetched, figures, time.monotonic() - batch.full_s, batch.waited_s)
        self.checkpoints.finish()
        self.export_model(progress)
        return "finished"

    def compute(self, progress: LearnerProgress, groups: Sequence[AnyGroup], fetched: Fetched) -> dict[str, float]:
        """Train on the step's groups, or skip the step if there are none. Return metrics."""
        if not groups:
            return self.skip(progress, fetched)
        progress.skipped_in_row = 0
        return self.train(groups)

    def train(self, groups: Sequence[AnyGroup]) -> dict[str, float]:
        """Run the step's optimizer updates on these groups. Return training metrics."""
        started_s = time.monotonic()
        return updates.train(self.policy, groups, self.config) | {"perf/train_s": time.monotonic() - started_s}

    def skip(self, progress: LearnerProgress, fetched: Fetched) -> dict[str, float]:
        """Skip a step whose batch has nothing to train on. The next version has the same weights.

        Raise ShoalError once MAX_SKIPS steps in a row were skipped.
        """
        if progress.skipped_in_row >= MAX_SKIPS:
            self.checkpoints.finish()  # commit, so that a restarted learner stops here, too
            raise ShoalError(
                f"step {progress.step + 1}: no group is left to train on, because {fetched.left_out} (see the log). "
                f"The {progress.skipped_in_row} steps before it were skipped too, so the run ends: look for a broken "
                "validator or coordinator"
            )
        log.error("step %d is skipped: no group is left to train on, because %s", progress.step + 1, fetched.left_out)
        progress.skipped_in_row += 1
        return {"optim/skipped": 1.0}

    def publish(self, progress: LearnerProgress) -> dict[str, float]:
        """Write the current version for the origin unless it is there already. Return `sync/` metrics."""
        started_s = time.monotonic()
        final = self.versions / version_name(progress.step)
        if not final.exists():
            self.policy.write(final)
        if self.node is None:
            return {}
        progress.version_digest = file_digest(final / WEIGHTS)
        self.node.policy_version = progress.step
        log.info("version %d is written to %s", progress.step, final)
        drop_old_versions(self.versions, self.config.learner.keep_versions)
        return report.sync_metrics(final, time.monotonic() - started_s)

    def export_model(self, progress: LearnerProgress) -> None:
        """Write the trained model for the user, with any adapters merged. Also write the adapters alone, for peft."""
        if self.node is None:
            return
        version, base = self.versions / version_name(progress.step), self.config.model.name
        if self.config.learner.lora is None:
            self.replace(MODEL, partial(copy_tree, version))
        else:
            self.replace(MODEL, partial(merge_adapters, version))
            self.replace(ADAPTER, partial(write_adapter, version, base=base))
        log.info("finished %d steps; the trained model is in %s", progress.step, self.folder / MODEL)

    def replace(self, name: str, write: Callable[[Path], None]) -> None:
        """Replace the folder `name` by a new folder that `write` creates."""
        temporary = self.folder / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        write(temporary)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        commit_folder(temporary, self.folder / name)

    def checkpoint(self, progress: LearnerProgress) -> None:
        """Start writing a checkpoint if one is due: every few steps, and after the last step."""
        if progress.step % self.checkpoints.every == 0 or progress.step == self.config.run.steps:
            self.checkpoints.begin(progress)

    def sign(self, folder: Path, step: int, files: dict[str, str]) -> None:
        """Sign the checkpoint in `folder`; it holds the state before `step`."""
        if self.node is not None:
            report.sign_folder(self.node, folder, step, files)

    def report(
        self,
        progress: LearnerProgress,
        before: str,
        fetched: Fetched,
        figures: dict[str, float],
        busy_s: float,
        waiting_s: float,
    ) -> None:
        """Report the step that just ended. `before` is the digest of the weights with which it started."""
        if self.node is None:
            return
        step = progress.step - 1
        figures |= report.batch_metrics(fetched, step, max_tokens=self.config.sampling.max_tokens)
        if fetched.groups:
            figures |= report.speed_metrics(
                n_tokens=sum(group.n_tokens for group in fetched.groups),
                flops=self._flops(fetched.groups) / self.ranks.size,
                train_s=figures.pop("perf/train_s"),
                busy_s=busy_s,
                waiting_s=waiting_s,
                peak_gflops=self.peak_gflops,
            )
        figures |= report.memory_metrics(str(self.policy.device))
        self.post(self.node, progress, before, fetched, figures)
        log.info(
            "step %d trained: %d groups, reward %.3f, busy %.1f s, waiting %.1f s",
            step + 1,
            len(fetched.groups),
            figures.get("reward/batch_mean", 0.0),
            busy_s,
            waiting_s,
        )

    def post(
        self, node: Node, progress: LearnerProgress, before: str, fetched: Fetched, figures: dict[str, float]
    ) -> None:
        """Post the metrics and the signed record of the step that just ended."""
        step, trained = progress.step - 1, [group.submission for group in fetched.groups]
        record = report.signed_record(node, step, fetched, before, progress.version_digest, self.policy)
        metrics = report.finite(figures)
        node.post("/v1/steps", StepReport(step=step, metrics=metrics, trained=trained, record=record), Ok)

    def _flops(self, groups: list[Group]) -> float:
        settings = self.config.learner
        extra = int(settings.loss.beta > 0)
        return report.training_flops(self.shape, with_gradient(groups, settings.loss), extra_forwards=extra)


def drop_old_versions(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` published versions, and what a killed process left of a deleted one."""
    remove_leftovers(folder)
    for old in sorted(folder.glob("v*"))[:-keep]:
        discard(old)
