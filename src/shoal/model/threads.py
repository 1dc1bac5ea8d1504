"""Sets PyTorch's number of threads in this process. Called by every computing role before its first matrix product."""

import torch


def compute_on(threads: int) -> None:
    """Use `threads` cores in this process; 0 means all that PyTorch finds."""
    if threads:
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
