"""Saves and restores the learner: fp32 masters, optimizer state, counters, random state, and submissions trained on.

torch.distributed.checkpoint (DCP) writes safetensors files in the background. Each rank writes its own shards.
DCP reads the live tensors, not copies. While it writes, the learner may wait for a batch and compute gradients, but its
next optimizer step waits until the checkpoint is written. A checkpoint can be restored with any number of ranks.
Invariant: writing a checkpoint does not change training. A checkpoint folder appears whole (temporary name, fsync, rename)
or not at all. A damaged checkpoint is refused. Nothing is unpickled, because DCP's Hugging Face format contains no
pickle.
Source of the format: ByteCheckpoint (arXiv 2407.20143).
"""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from shoal.errors import ShoalError
from shoal.files import commit_folder, digests, discard, remove_leftovers
from shoal.learner.policy import Policy
from shoal.learner.ranks import from_leader

PROGRESS = "progress.json"
FILES = "files.json"  # BLAKE3 of every other file
RNG = "rng_state"  # state of torch's CPU generator
STEP = "step"  # the key of AdamW's update count in a master's optimizer state
STEPS = "steps"  # the update counts of all masters; updates without a gradient do not count
# The limit on a file's bytes. DCP copies a file in memory before it writes it, and only a small copy's memory is reused.
FILE_BYTES = 24 << 20

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")


@dataclass
class LearnerProgress:
    """How far training is: `step` steps are done, so the policy is version `step`."""

    step: int = 0
    updates: int = 0
    skipped_in_row: int = 0  # consecutive steps with nothing to train on
    version_digest: str = ""  # BLAKE3 of that version's weights file; empty before it is published
    trained: list[str] = field(default_factory=list)  # submissions trained on, in order
    place: dict[str, int] | None = None  # position of the next token in the text (`pretrain/text`)

    def advance(self, submissions: Iterable[str]) -> None:
        """Count one more step, trained on groups of `submissions`."""
        self.step += 1
        self.trained += dict.fromkeys(submissions)


class _NoCopy(AsyncStager):
    """Passes the live tensors to the writer. Call `Checkpoints.finish` before you change them."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


class Checkpoints:
    def __init__(
        self,
        folder: Path,
        policy: Policy,
        sign: Callable[[Path, int, dict[str, str]], None] = lambda folder, step, files: None,
    ) -> None:
        """`sign` is called with a complete checkpoint's temporary folder, its step, and the BLAKE3 of each file."""
        self.folder = folder
        self.policy = policy
        self.sign = sign
        self.ranks = policy.ranks
        self.every = policy.config.steps_between_checkpoints(policy.trained)
        self._writing: tuple[Future[Any], LearnerProgress] | None = None
        policy.before_update = self.finish

    def begin(self, progress: LearnerProgress) -> None:
        """Start writing the state as it is after `progress.step` steps. Call `finish` before the next optimizer step."""
        self.finish()
        temporary = self._temporary(progress.step)
        found = None
        if self.ranks.leads:  # only the leader decides, because it may rename the folder while others look
            found = b"exists" if (self.folder / _name(progress.step)).exists() else b""
            if not found:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        if self.ranks.broadcast(found):
            return
        tensors = self._tensors()
        future = async_save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(temporary), _files(tensors), save_distributed=True),
            process_group=self.ranks.checkpoint_group,
            async_stager=_NoCopy(),
            no_dist=self.ranks.size == 1,
        )
        assert isinstance(future, Future)
        progress.updates = self.policy.updates
        copy = replace(progress, trained=[*progress.trained])  # the caller keeps changing `progress`
        self._writing = (future, copy)

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any, and commit it. Raise OSError if writing failed."""
        if self._writing is None:
            return
        (future, progress), self._writing = self._writing, None
        temporary = self._temporary(progress.step)
        try:
            future.result()
        except CheckpointException as error:
            why = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
            raise OSError(f"checkpoint {temporary} could not be written: {why}") from error
        if not self.ranks.leads:
            return
        (temporary / PROGRESS).write_text(json.dumps(asdict(progress)))
        files = digests(temporary)
        (temporary / FILES).write_text(json.dumps(files))
        self.sign(temporary, progress.step, files | {FILES: blake3((temporary / FILES).read_bytes()).hexdigest()})
        commit_folder(temporary, self.folder / _name(progress.step))
        for old in self._surplus():
            discard(old)

    def restore(self) -> LearnerProgress:
        """Load the newest complete checkpoint into the policy and return its progress.

        Without a checkpoint, return a new progress. Raise ShoalError on every rank if the checkpoint is damaged or
        another policy's.
        """
        complete = self._complete()
        if self.ranks.leads:
            remove_leftovers(self.folder)
            for incomplete in sorted(self.folder.glob(".step-*")):
                log.warning("ignoring %s: the learner ended before this checkpoint was complete", incomplete)
        if not complete:
            return LearnerProgress()
        newest = complete[-1]
        from_leader(self.ranks, lambda: _check(newest), lambda _: b"", lambda _: None)
        progress = LearnerProgress(**json.loads((newest / PROGRESS).read_text()))
        self.policy.updates = progress.updates
        tensors = self._tensors()
        try:
            load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(newest)),
                process_group=self.ranks.checkpoint_group,
                no_dist=self.ranks.size == 1,
            )
        except CheckpointException as error:  # a BaseException that is not an Exception
            why = "; ".join(str(failure) for failure, _ in error.failures.values())
            raise ShoalError(f"{newest} does not hold this policy's state: {why}") from error
        if STEPS in tensors:
            states = (self.policy.optimizer.state[master] for master in self.policy.masters.values())
            for state, step in zip(states, tensors[STEPS], strict=True):
                state[STEP].copy_(step)
        self.policy.round()
        torch.set_rng_state(tensors[RNG])
        return progress

    @torch.no_grad()
    def difference(self, folder: Path, before: Mapping[str, Tensor], tolerance: float) -> str:
        """Compare the checkpoint in `folder` with the policy. Return the name of the first value that differs, or "".

        `tolerance`: of a moment, and of a master's update since `before`, in lengths. Counters must be equal.
        """
        if json.loads((folder / PROGRESS).read_text())["updates"] != self.policy.updates:
            return "updates"
        live, reader = self._tensors(), HuggingFaceStorageReader(str(folder))
        if names := live.keys() ^ reader.read_metadata().state_dict_metadata.keys():
            return min(names)
        kept = {name: torch.empty_like(tensor, device="cpu") for name, tensor in live.items()}
        try:
            load(kept, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException:
            return "a tensor's shape"
        for name, theirs in kept.items():
            ours, start = live[name].cpu(), before.get(name.removeprefix("model."))
            length = (ours if start is None else ours - start.cpu()).float().norm()
            near = tolerance and name not in (RNG, STEPS) and (theirs - ours).float().norm() <= tolerance * length
            if not near and not torch.equal(theirs, ours):
                return name
        return ""

    def _tensors(self) -> dict[str, Tensor]:
        """Return masters and optimizer state by name. All tensors are live, except for RNG and STEPS."""
        tensors: dict[str, Tensor] = {RNG: torch.get_rng_state()}
        for name, master in self.policy.masters.items():
            tensors[f"model.{name}"] = master.detach()
        if self.policy.updates:
            states = {name: self._optimizer_state(master) for name, master in self.policy.masters.items()}
            tensors[STEPS] = torch.stack([state[STEP].cpu() for state in states.values()])
            for name, state in states.items():
                tensors |= {f"{moment}.{name}": tensor for moment, tensor in state.items() if moment != STEP}
        return tensors

    def _optimizer_state(self, master: Tensor) -> dict[str, Tensor]:
        """Return the live optimizer state of one master. If it has no update yet, initialise it as AdamW would."""
        state: dict[str, Tensor] = self.policy.optimizer.state[master]
        if not state:
            state[STEP] = torch.zeros((), device=master.device)
            state |= {moment: torch.zeros_like(master) for moment in ("exp_avg", "exp_avg_sq")}
        return state

    def _temporary(self, step: int) -> Path:
        return self.folder / f".{_name(step)}"

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if (path / PROGRESS).exists())

    def _surplus(self) -> list[Path]:
        return self._complete()[: -self.policy.config.keep_last]


def _check(folder: Path) -> None:
    """Raise ShoalError if a file changed since it was written."""
    present = digests(folder)
    try:
        changed = [
            name for name, digest in json.loads((folder / FILES).read_text()).items() if present.get(name) != digest
        ]
    except (OSError, ValueError):
        changed = [FILES]
    if changed:
        raise ShoalError(f"{folder / changed[0]} is damaged: remove {folder} to go on from an older checkpoint")


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _files(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return, by tensor name, the number (from 1) of the file to which the tensor is written."""
    numbers, number, used_bytes = {}, 1, 0
    for name, tensor in tensors.items():
        size_bytes = tensor.numel() * tensor.element_size()
        if used_bytes and used_bytes + size_bytes > FILE_BYTES:
            number, used_bytes = number + 1, 0
        numbers[name] = number
        used_bytes += size_bytes
    return numbers
