"""What the settings take of this machine, said once when the learner starts: memory of weights and of a row, checkpoints.

By the arithmetic of `memory`. It changes nothing: a row's size decides which sums are rounded where, so only a person
changes it. What does not fit is said with the settings that would.
Called by `shoal learner`, on the leading rank.
"""

import os
from collections.abc import Callable
from functools import partial

import torch

from shoal.config import Config
from shoal.config.recipe import CHECKPOINT_BYTES
from shoal.learner.memory import memory_of
from shoal.learner.policy import Policy
from shoal.learner.work import Sizes, SizesError, sizes_of, work_of

GB = 1e9
SAVED_BYTES = {"adamw": 0, "adamw_8bit": 6, "muon": 4}  # of state, per entry of the blocks' matrices, against AdamW
SETTINGS = ("activation_checkpointing", "offload")  # that make a row take less, the cheaper one first
UNIT = 1024  # tokens; suggested rows are multiples


def lines(config: Config, policy: Policy) -> list[str]:
    """Sentences for a person."""
    section, trained = config.learner, policy.trained
    every = section.steps_between_checkpoints(trained)
    asked = (
        "learner.checkpoint_every" if section.checkpoint_every else "by size; set learner.checkpoint_every to change it"
    )
    where = "masters, moments and summed gradients" if policy.offloads else "nothing"
    said = [f"{trained / 1e6:,.0f} million trained parameters on {policy.ranks.size} rank(s), {where} on the host"]
    said.append(
        f"a checkpoint every {every} step(s) of up to {CHECKPOINT_BYTES * trained / GB:.1f} GB ({asked}), "
        f"{section.keep_last} kept"
    )
    if section.lora is not None:
        return [*said, "memory is not estimated for adapters"]
    try:
        sizes = sizes_of(policy.model.config.get_text_config(decoder=True).to_dict())
    except SizesError as error:
        return [*said, f"memory is not estimated: {error}"]
    return [*said, *_memory(config, policy, sizes, available_bytes(policy.device))]


def _memory(config: Config, policy: Policy, sizes: Sizes, available: float) -> list[str]:
    section, cpu = config.learner, policy.device.type == "cpu"
    smaller = SAVED_BYTES[section.optimizer] * sizes.body / policy.ranks.size

    def needed(row_tokens: int, settings: frozenset[str]) -> tuple[float, float]:
        """On the device and on the host, of each rank."""
        changed = {"row_tokens": row_tokens} | {name: name in settings for name in SETTINGS}
        planned = config.model_copy(update={"learner": section.model_copy(update=changed)})
        work = work_of(planned, prompt=1, length=row_tokens)  # several full rows
        found = memory_of(sizes, work, policy.compute.itemsize, devices=policy.ranks.size, cpu=cpu)
        if found.offloaded:
            return found.roles["learner"], found.offloaded - smaller
        return found.roles["learner"] - smaller, 0.0

    def fits(settings: frozenset[str], row_tokens: int) -> bool:
        return needed(row_tokens, settings)[0] <= available

    now = frozenset(name for name in SETTINGS if getattr(section, name))
    own, host = needed(section.row_tokens, now)
    how = "recomputed in the backward pass" if section.activation_checkpointing else "kept"
    said = [
        f"up to {own / GB:.1f} of {available / GB:.1f} GB with a full row of learner.row_tokens = {section.row_tokens}, "
        f"activations {how}"
    ]
    if host:
        here = available_bytes(torch.device("cpu"))
        said.append(f"{host / GB:.1f} GB of the host's {here / GB:.1f} GB a rank, for each rank on it")
    elif not cpu:
        less, moved = needed(section.row_tokens, now | {"offload"})
        said.append(f"{less / GB:.1f} GB, and {moved / GB:.1f} GB of the host, with learner.offload = true")
    if own <= available:
        return said
    rows: dict[frozenset[str], int] = {}  # by the settings that give them, and with which nothing less gives as many
    for added in map(frozenset, ([], ["activation_checkpointing"], ["offload"], SETTINGS)):
        if not (added & now or (cpu and "offload" in added)):
            most = _largest_row(partial(fits, now | added), config.sampling.max_tokens, section.row_tokens)
            if most > max((rows[of] for of in rows if of < added), default=0):
                rows[added] = most
    fitting = [
        f"learner.row_tokens = {most}" + "".join(f" and learner.{name} = true" for name in SETTINGS if name in added)
        for added, most in rows.items()
    ]
    return [*said, f"full rows will not fit: set {', or '.join(fitting)}" if fitting else "no row fits: use more ranks"]


def _largest_row(fits: Callable[[int], bool], longest: int, most: int) -> int:
    """The largest multiple of UNIT above `longest`, a completion, and up to `most` that fits; 0 if none does."""
    return max((rows for rows in range(UNIT, most + 1, UNIT) if rows > longest and fits(rows)), default=0)


def available_bytes(device: torch.device) -> float:
    """The memory of the device."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
