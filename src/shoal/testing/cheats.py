"""Workers that lie, each in one way, by changing one method of the honest worker.

Started by `shoal run` where `workers.cheat` names one; never imported by the worker itself. Each kind lies from its first
submission on, so every submission it hands in must be rejected.
"""

import argparse
import sys
from pathlib import Path

import torch

from shoal import process
from shoal.config import Cheat
from shoal.messages import Assignment
from shoal.roles import run_worker
from shoal.rollout.engine import Sampling
from shoal.rollout.torch_engine import TorchEngine
from shoal.rollout.worker import Worker
from shoal.shardcast import Manifest
from shoal.store.rollouts import Rollout

VERSIONS_BEHIND = 4


class OlderWeights(Worker):
    """Generates with the first version it ever loaded, and says it has the newest."""

    def take_weights(self, newest: tuple[Path, Manifest] | None) -> None:
        if newest is None or newest[1].version == self.node.policy_version:
            return
        if self.tokenizer is None:
            self.first_version = newest[1].version
            super().take_weights(newest)
        is_a_lie = newest[1].version >= self.first_version + VERSIONS_BEHIND
        self.node.policy_version = newest[1].version if is_a_lie else None  # None: asks for no task yet


class QuantizedWeights(Worker):
    """Generates with weights rounded to 4 bits (symmetric, one scale for 32 values), to save memory."""

    def take_weights(self, newest: tuple[Path, Manifest] | None) -> None:
        before = self.node.policy_version
        super().take_weights(newest)
        if self.node.policy_version != before and isinstance(self.engine, TorchEngine):
            for module in self.engine.model.base_model.layers.modules():
                if isinstance(module, torch.nn.Linear):
                    round_to_4_bits_(module.weight.data)


class ForgedReward(Worker):
    """Claims that every answer was right."""

    def generate(self, assignment: Assignment) -> list[Rollout]:
        return [Rollout(**vars(rollout) | {"reward": 1.0}) for rollout in super().generate(assignment)]


class WrongTemperature(Worker):
    """Samples at half the stated temperature, for surer answers."""

    def generate(self, assignment: Assignment) -> list[Rollout]:
        stated = self.sampling
        self.sampling = Sampling(stated.temperature / 2, stated.max_tokens, stated.eos_ids)
        rollouts = super().generate(assignment)
        self.sampling = stated
        return rollouts


class ReplayedSubmission(Worker):
    """Generates once, and hands that one file in for every later task."""

    file: bytes | None = None
    made_for = ""

    def generate(self, assignment: Assignment) -> list[Rollout]:
        return super().generate(assignment) if self.file is None else []

    def upload(self, assignment: Assignment, data: bytes) -> None:
        if self.file is None:
            self.file, self.made_for = data, assignment.id  # held back: handed in for its own task it would be honest
        elif assignment.id != self.made_for:
            super().upload(assignment, self.file)


CHEATS: dict[Cheat, type[Worker]] = {
    "older_weights": OlderWeights,
    "quantized_weights": QuantizedWeights,
    "forged_reward": ForgedReward,
    "wrong_temperature": WrongTemperature,
    "replayed_submission": ReplayedSubmission,
}


def round_to_4_bits_(weight_OI: torch.Tensor, block: int = 32) -> None:
    """Round in place to 15 levels a block of `block` values, as simple 4-bit quantisation does."""
    flat = weight_OI.view(-1, block)
    scale = flat.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 7
    flat.copy_((flat / scale).round() * scale)


def main() -> int:
    """`python -m shoal.testing.cheats KIND --join INVITE --dir DIR`: a worker that lies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=list(CHEATS))
    parser.add_argument("--join", required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0)
    arguments = parser.parse_args()
    stop = process.begin(f"worker that lies ({arguments.kind})", threads=arguments.threads, parent=arguments.parent)
    return 3 if run_worker(arguments, stop, CHEATS[arguments.kind]) == "evicted" else 0


if __name__ == "__main__":
    sys.exit(main())
