"""The processes that train one policy: collective messages between them, and the sharding of weights over them.

    torchrun --nproc-per-node 4 -m shoal learner --join INVITE --dir DIR

Rank 0, the leader, is the only rank that talks to the pool. FSDP2 (`fully_shard`) shards the weights, reduces gradients
and handles mixed precision. Without torchrun there is one rank, and torch.distributed is not used.
Invariant: ranks exchange bytes and tensors, never pickled objects, and make the same calls in the same order. The
leader reads config, dtype and everything else, and sends it to the other ranks (`from_leader`).
CPU tensors use gloo, and GPU tensors use NCCL.
Source: FSDP2, pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shoal.config import Config, parse
from shoal.diloco.site import GIVE_UP_S
from shoal.errors import ShoalError
from shoal.model import dtype
from shoal.model.dtype import DtypeName
from shoal.model.training import local, shard_rows
from shoal.model.tree import blocks
from shoal.protocol.calling import StoppedError

T = TypeVar("T")
Result = TypeVar("Result")


class Ranks:
    """This process's rank, and the collectives. There is one rank unless `start` ran under torchrun."""

    def __init__(self, rank: int = 0, size: int = 1, checkpoint_group: Any = None, waiting_group: Any = None) -> None:
        self.rank = rank
        self.size = size
        # Checkpoints have a group of their own, because they are written while gradients are reduced.
        self.checkpoint_group = checkpoint_group
        self.waiting_group = waiting_group  # for the leader's messages, which other ranks may await for days

    @classmethod
    def start(cls, timeout_s: float, leader_timeout_s: float) -> "Ranks":
        """Connect the ranks that torchrun's environment variables describe.

        A collective fails after `timeout_s`, so a rank that hangs ends the run soon. The leader's messages may take
        `leader_timeout_s`.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        checkpoints = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=leader_timeout_s))
        return cls(dist.get_rank(), size, checkpoints, waiting)

    @cached_property
    def mesh(self) -> Any:
        """All ranks as a one-dimensional device mesh, for FSDP."""
        return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (self.size,))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def stop(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the leader's message on every rank. The other ranks pass None."""
        if self.size == 1:
            assert message is not None
            return message
        length = torch.tensor([len(message or b"")])
        dist.broadcast(length, src=0, group=self.waiting_group)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        if not self.leads:
            data = torch.empty(int(length), dtype=torch.uint8)
        if len(data):
            dist.broadcast(data, src=0, group=self.waiting_group)
        return data.numpy().tobytes()

    def deal(self, messages: Sequence[bytes] | None, size_bytes: int) -> bytes:
        """Return this rank's message, of `size_bytes`. The leader passes a message per rank. Other ranks pass None."""
        if messages is None:
            data = torch.empty(size_bytes, dtype=torch.uint8)
            if size_bytes:
                dist.recv(data, src=0, group=self.waiting_group)
            return data.numpy().tobytes()
        sends = []  # keeps the tensors alive until they are sent
        for rank, message in enumerate(messages):
            if rank and message:
                tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
                sends.append((tensor, dist.isend(tensor, dst=rank, group=self.waiting_group)))
        for _, work in sends:
            assert work is not None
            work.wait()
        return messages[0]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each named value over the ranks. All ranks must pass the same names."""
        if self.size == 1:
            return dict(values)
        names = sorted(values)
        totals = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(totals)
        return dict(zip(names, totals.tolist(), strict=True))

    def scatter(self, items: Sequence[T]) -> list[T | None]:
        """Return this rank's share of `items`, which all ranks pass. Shares are padded with None to equal length."""
        rounds = -(-len(items) // self.size)
        return [items[i] if (i := turn * self.size + self.rank) < len(items) else None for turn in range(rounds)]

    def shard(self, root: Any, compute: torch.dtype) -> None:
        """Shard the weights of `root.model` over the ranks.

        FSDP gathers a block's weights only while the block is used, in the dtype `compute`. Weights on the meta device
        become shards without data, which are loaded later (`model/training`). Gradients are summed over the ranks, not
        averaged, in float32.
        """
        if self.size == 1:
            return
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        settings: dict[str, Any] = {"mesh": self.mesh, "mp_policy": policy}
        if not any(parameter.requires_grad for parameter in root.parameters()):
            # Otherwise, weights outside the blocks would stay gathered for a backward pass that never comes.
            settings["reshard_after_forward"] = True
        for module in (*blocks(root.model), root):
            fully_shard(module, **settings)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def reshard(self, root: Any) -> None:
        """Drop the gathered weights that a forward pass without gradient keeps for a backward pass that never comes."""
        if self.size > 1:
            root.reshard()

    def gathered(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the full tensor in `dtype` on the leader's CPU, and None on other ranks. All ranks must call it."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", dtype) if self.leads else None
        own = local(tensor.detach()).to(dtype)
        rows = shard_rows(tensor)
        if len(own) < rows:
            own = torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
        result = own.new_empty(rows * self.size, *own.shape[1:]) if self.leads else None
        parts = None if result is None else [part.view(torch.uint8) for part in torch.split(result, rows)]
        dist.gather(own.contiguous().view(torch.uint8), parts, dst=0)  # as bytes, which every backend supports
        return None if result is None else result[: len(tensor)].cpu()

    @torch.no_grad()
    def spread_(self, tensor: Tensor, value: Tensor | None) -> None:
        """Scatter the leader's full `value` into a sharded tensor; other ranks pass None. All ranks must call it."""
        assert isinstance(tensor, DTensor)
        own, rows = local(tensor), shard_rows(tensor)
        result = own.new_empty(rows, *own.shape[1:])
        parts = None
        if value is not None:
            padded = result.new_zeros(rows * self.size, *own.shape[1:])
            padded[: len(value)] = value
            parts = list(torch.split(padded, rows))
        dist.scatter(result, parts, src=0)
        own.copy_(result[: len(own)])


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; return any other tensor unchanged. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


RANKS_TIMEOUT_S = 1800.0  # limit for each collective: longer than any step or checkpoint takes


def start_ranks(config: Config) -> tuple[Ranks, Config, DtypeName]:
    """Connect torchrun's ranks. Return them and the leader's config and compute dtype. Raise DeviceError."""
    ranks = Ranks.start(RANKS_TIMEOUT_S, RANKS_TIMEOUT_S + GIVE_UP_S)
    agreed, picked = config_from_leader(ranks, lambda: (config, dtype.pick(config.model.dtype, config.model.device)[0]))
    return ranks, agreed, picked


def config_from_leader(ranks: Ranks, read: Callable[[], tuple[Config, DtypeName]]) -> tuple[Config, DtypeName]:
    """Return on every rank the config and compute dtype that `read` returns on the leader. Errors: see `from_leader`."""

    def decode(message: bytes) -> tuple[Config, DtypeName]:
        tables, picked = json.loads(message)
        return parse(tables), picked

    return from_leader(
        ranks, read, lambda both: json.dumps([both[0].model_dump(exclude_none=True), both[1]]).encode(), decode
    )


def from_leader(
    ranks: Ranks, read: Callable[[], Result], encode: Callable[[Result], bytes], decode: Callable[[bytes], Result]
) -> Result:
    """Call `read` on the leader and return its result on every rank.

    If `read` raises StoppedError, so do all ranks. If it raises another ShoalError, the other ranks raise ShoalError.
    """
    if not ranks.leads:
        message = ranks.broadcast(None)
        if message[:1] == b".":
            raise StoppedError(message[1:].decode())
        if message[:1] == b"!":
            raise ShoalError(f"rank 0 ended: {message[1:].decode()}")
        return decode(message[1:])
    try:
        result = read()
    except ShoalError as error:
        ranks.broadcast((b"." if isinstance(error, StoppedError) else b"!") + str(error).encode())
        raise
    if ranks.size > 1:
        ranks.broadcast(b"=" + encode(result))
    return result
