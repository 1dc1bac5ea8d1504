"""The learner's memory across restarts: fp32 weights, optimizer state and counters in one safetensors file a checkpoint.

Invariant: a checkpoint folder appears whole (temporary name, fsync, rename) or not at all; nothing is unpickled.
Called by the learner's loop. Left out: sharded and asynchronous checkpoints.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shoal.learner.policy import Policy
from shoal.model.load import tied_names

STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(policy: Policy, step: int, folder: Path, *, keep: int = 2) -> None:
    """Write the state before `step` (so many steps are done) and drop all but the newest `keep` checkpoints."""
    final = folder / f"step-{step:06d}"
    if final.exists():
        return
    temporary = folder / f".step-{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in _parameters(policy)}
    for name, parameter in _parameters(policy):
        for moment in MOMENTS if policy.updates else ():
            tensors[f"{moment}.{name}"] = policy.optimizer.state[parameter][moment]
    counters = {"step": step, "updates": policy.updates}
    save_file(tensors, temporary / STATE, metadata={"counters": json.dumps(counters)})
    _fsync(temporary / STATE)
    _fsync(temporary)
    temporary.rename(final)
    _fsync(folder)
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old)


def restore(policy: Policy, folder: Path) -> int:
    """Load the newest checkpoint into `policy`. Returns the step it stands before; 0 where there is none."""
    complete = _complete(folder)
    if not complete:
        return 0
    with safe_open(complete[-1] / STATE, framework="pt", device=policy.device) as file, torch.no_grad():
        counters = json.loads(file.metadata()["counters"])
        for name, parameter in _parameters(policy):
            parameter.copy_(file.get_tensor(f"model.{name}"))
            if counters["updates"]:
                policy.optimizer.state[parameter] = {
                    "step": torch.tensor(float(counters["updates"])),
                    **{moment: file.get_tensor(f"{moment}.{name}") for moment in MOMENTS},
                }
    policy.updates = counters["updates"]
    return int(counters["step"])


def _parameters(policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    tied = tied_names(policy.model)
    return [(name, parameter) for name, parameter in policy.model.named_parameters() if name not in tied]


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / STATE).exists())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
