"""Run a `shoal` command on two ranks: in two processes that communicate over gloo, as torchrun would start them."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

import torch

from shoal.cli.main import main

LIMIT_S = 300.0


def on_two_ranks(words: list[str], before: Callable[[], None] | None = None) -> list[int | None]:
    """Run a command on two ranks and return each rank's exit status. Each process first calls `before`.

    The processes import PyTorch anew, because autograd may refuse to work in a fork of a process that has used it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawned = multiprocessing.get_context("spawn")
    ranks = [spawned.Process(target=_rank, args=(rank, port, words, before)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(LIMIT_S)
        each.kill()
    return [each.exitcode for each in ranks]


def _rank(rank: int, port: int, words: list[str], before: Callable[[], None] | None) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if before:
        before()
    status = main(words)
    sys.stderr.flush()
    os._exit(status)
