"""The learner's memory across restarts: fp32 weights, optimizer state and counters in one safetensors file.

Invariant: a checkpoint folder appears whole (temporary name, fsync, rename) or not at all; nothing is unpickled.
Called by the learner's loop. Left out: sharded and asynchronous checkpoints.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shoal.durable import fsync
from shoal.learner.policy import Policy
from shoal.model.load import tied_names

PARTS = ("model", "exp_avg", "exp_avg_sq")  # a file each: a file is copied in memory while it is written
COUNTERS = "counters.json"


def save(policy: Policy, step: int, folder: Path, *, keep: int = 2) -> None:
    """Write the state before `step` (so many steps are done) and drop all but the newest `keep` checkpoints."""
    final = folder / f"step-{step:06d}"
    if final.exists():
        return
    temporary = folder / f".step-{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with policy.masters():
        for part in PARTS if policy.updates else PARTS[:1]:
            tensors = {
                name: parameter.detach() if part == "model" else policy.optimizer.state[parameter][part]
                for name, parameter in _parameters(policy)
            }
            save_file(tensors, temporary / f"{part}.safetensors")
            fsync(temporary / f"{part}.safetensors")
    (temporary / COUNTERS).write_text(json.dumps({"step": step, "updates": policy.updates}))
    fsync(temporary / COUNTERS)
    fsync(temporary)
    temporary.rename(final)
    fsync(folder)
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old)


def restore(policy: Policy, folder: Path) -> int:
    """Load the newest checkpoint into `policy`. Returns the step it stands before; 0 where there is none."""
    complete = _complete(folder)
    if not complete:
        return 0
    newest = complete[-1]
    counters = json.loads((newest / COUNTERS).read_text())
    for part in PARTS if counters["updates"] else PARTS[:1]:
        path = newest / f"{part}.safetensors"
        with safe_open(path, framework="pt", device=policy.device) as file, policy.masters():
            for name, parameter in _parameters(policy):
                if part == "model":
                    parameter.copy_(file.get_tensor(name))
                    continue
                state = policy.optimizer.state.setdefault(parameter, {})
                state["step"] = torch.tensor(float(counters["updates"]), device=parameter.device)
                state[part] = file.get_tensor(name)
    policy.updates = counters["updates"]
    return int(counters["step"])


def _parameters(policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    tied = tied_names(policy.model)
    return [(name, parameter) for name, parameter in policy.model.named_parameters() if name not in tied]


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / COUNTERS).exists())
