"""Sets PyTorch's number of threads in this process: for good, before a role's first matrix product, or for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_on(threads: int) -> None:
    """Use `threads` cores in this process; 0 means all that PyTorch finds."""
    if threads:
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)


@contextmanager
def temporarily_on(threads: int) -> Iterator[None]:
    """Use `threads` cores within it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
