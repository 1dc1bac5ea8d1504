"""How many threads PyTorch computes on in this process. Called by every role that computes, before its first product."""

import torch


def compute_on(threads: int) -> None:
    """Use `threads` cores in this process. 0: as many as PyTorch finds."""
    if threads:
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
