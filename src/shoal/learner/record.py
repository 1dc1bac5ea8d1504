"""What the learner signs about each step: which groups, from which files, turned which weights into which; and the files
of each checkpoint.

Invariant: the record names rows and weights by their digests. So whoever holds the accepted files can tell whether the step
was trained on them, and whoever computes as this machine does gets the same weights again.
Called by the learner's loop, and by the audit, which compares its own `computed` with the learner's.
"""

import platform
from pathlib import Path

import torch

from shoal.learner.groups import Fetched
from shoal.learner.policy import Policy
from shoal.protocol.identity import Signed
from shoal.protocol.messages import BatchGroup, CheckpointRecord, Computed, StepRecord
from shoal.protocol.node import Node

DOMAIN, CHECKPOINT = "trained", "checkpoint"
SIGNED = "signed.json"  # in a checkpoint's folder
CPUINFO = Path("/proc/cpuinfo")


def signed_record(node: Node, step: int, fetched: Fetched, before: str, after: str, policy: Policy) -> str:
    """The Signed StepRecord of one step, as JSON; `before` and `after` are digests of weights."""
    used = dict.fromkeys(group.submission for group in fetched.groups)
    record = StepRecord(
        run=node.invite.run,
        step=step,
        groups=[BatchGroup(submission=group.submission, group=group.number) for group in fetched.groups],
        files={submission: fetched.contents[submission] for submission in used},
        before=before,
        after=after,
        computed=computed(policy),
    )
    return Signed.make(node.identity, record.model_dump_json(), domain=DOMAIN).model_dump_json()


def sign_folder(node: Node, folder: Path, step: int, files: dict[str, str]) -> None:
    """Write SIGNED into a checkpoint's folder: which files it has, with their BLAKE3, under the learner's signature."""
    record = CheckpointRecord(run=node.invite.run, step=step, files=files)
    signed = Signed.make(node.identity, record.model_dump_json(), domain=CHECKPOINT)
    (folder / SIGNED).write_text(signed.model_dump_json())


def computed(policy: Policy) -> Computed:
    """How this process computes. Equal ones give equal bits; of unequal ones nothing is known."""
    return Computed(
        dtype="bfloat16" if policy.compute is torch.bfloat16 else "float32",
        threads=torch.get_num_threads(),
        ranks=policy.ranks.size,
        torch=torch.__version__,
        machine=_machine(policy.device)[:200],
    )


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {cpu}"
