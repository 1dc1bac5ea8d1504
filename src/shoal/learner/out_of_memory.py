"""Turns a failed allocation while a row is computed into an error that names the setting to lower.

Called by the policy around each row. Left out: the kernel's out-of-memory killer, which `shoal run` reports as signal 9.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.config.recipe import LearnerSection
from shoal.errors import ShoalError, first_line


class OutOfMemoryError(ShoalError):
    """This machine or device has too little memory for a row. The message says what to lower."""

    restart_helps = True  # another process may have held the memory


@contextmanager
def explained(config: LearnerSection) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        message = str(error)
        of_device = isinstance(error, torch.OutOfMemoryError)
        known = "not enough memory" in message or "can't allocate memory" in message
        if isinstance(error, RuntimeError) and not of_device and not known:
            raise
        hint = "" if config.activation_checkpointing else " or set learner.activation_checkpointing = true"
        hint += " or learner.offload = true" if of_device and not config.offload else ""
        raise OutOfMemoryError(
            f"out of memory while computing a row: lower learner.row_tokens (now {config.row_tokens}){hint}; "
            f"{first_line(error)}"
        ) from error
