"""The model that is trained, its optimizer and one update: on one rank, or on several that act as one.

Several ranks hold weights and moments in shards (FSDP2, `learner.ranks`). The leader trains. Each call that it makes here is
told to the other ranks, which are in `follow` and make the same call.
Invariant: a step has the same micro-batches on any number of ranks, so its result differs only by the order in which their
gradients are summed. After `push` all ranks have the leader's weights.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.config import ConfigError
from shoal.config.sites import PretrainSection
from shoal.learner.policy import DivergedError
from shoal.learner.ranks import Ranks, whole
from shoal.model.load import Root
from shoal.model.training import local, own_rows

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1  # of AdamW; the decay is DiLoCo's (arXiv 2311.08105, table 5)
GRAD_CLIP = 1.0  # largest gradient norm; larger gradients are scaled down
MOMENTS = ("exp_avg", "exp_avg_sq")
CALLS = ("step", "evaluate", "pull", "push", "state", "restore", "reset")


def named(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's own parameters by name: the live tensors, each once."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


class Net:
    def __init__(
        self,
        model: Any,
        settings: PretrainSection,
        ranks: Ranks | None = None,
        *,
        device: str = "cpu",
        autocast: bool = False,
    ) -> None:
        """`autocast`: compute in bf16. Raise ConfigError if the ranks cannot share a step evenly."""
        self.settings, self.ranks, self.autocast = settings, ranks or Ranks(), autocast
        self.model, self.device = model.to(device), torch.device(device)
        self._check_shares()
        self.root = Root(self.model)
        self.tensors = named(self.model)  # on the leader: the parameters, whole; live, or as of the last `pull`
        self.sharded = self.ranks.size > 1
        if self.sharded:
            held = self.tensors if self.ranks.leads else {}
            self.tensors = {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}
            self.ranks.shard(self.root, torch.float32)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = self._optimizer()
        self.updates = 0  # since the moments were zero

    def step(self, ids_BT: Tensor, *, lr: float, number: int) -> tuple[float, float]:
        """Update once. Return the mean loss in nats per token and the gradient's norm. Raise DivergedError."""
        self._tell("step", ids_BT, lr=lr, number=number)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._gradients(ids_BT)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), GRAD_CLIP)))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"step {number}: the loss is {loss}, the gradient's norm {norm}: lower pretrain.lr, or look at the "
                "data there"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return loss, norm

    @torch.no_grad()
    def evaluate(self, ids_ST: Tensor) -> float:
        """The mean loss in nats per token."""
        self._tell("evaluate", ids_ST)
        micro_batches, total = self._micro_batches(ids_ST), 0.0
        self.model.eval()
        for micro_MT in self.ranks.scatter(micro_batches):
            loss = self._loss(micro_batches[0] if micro_MT is None else micro_MT)  # all ranks compute equally often
            total += 0.0 if micro_MT is None else float(loss) * len(micro_MT)
        self.model.train()
        if isinstance(self.root, FSDPModule):
            self.root.reshard()  # it would keep the root's weights for a backward pass that never comes
        return self.ranks.sum({"loss": total})["loss"] / len(ids_ST)

    def pull(self) -> None:
        """Bring `tensors` up to date."""
        if self.sharded:
            self._tell("pull")
            for name, parameter in self.parameters.items():
                result = self.ranks.gathered(parameter, torch.float32)
                if result is not None:
                    self.tensors[name].copy_(result)

    def push(self) -> None:
        """Give all ranks the weights in the leader's `tensors`."""
        if self.ranks.size > 1:
            self._tell("push")
            for name, parameter in self.parameters.items():
                self._spread(self.tensors.get(name), parameter)

    def state(self) -> dict[str, Tensor]:
        """Weights and moments by their names in a checkpoint, whole; on the leader."""
        self._tell("state")
        result = {}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter] if self.updates else {}
            held = {"model": parameter} | {moment: moments[moment] for moment in MOMENTS if moments}
            for kind, tensor in held.items():
                gathered = self.ranks.gathered(tensor, torch.float32)
                if gathered is not None:
                    result[f"{kind}.{name}"] = gathered
        return result

    @torch.no_grad()
    def restore(self, held: Mapping[str, Tensor] | None = None, *, updates: int) -> None:
        """Take over what `state` returned after so many updates. Only the leader has it."""
        self._tell("restore", updates=updates)
        held, self.updates = held or {}, updates
        for name, parameter in self.parameters.items():
            self._spread(held.get(f"model.{name}"), parameter)
            if updates:
                moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                for moment, tensor in moments.items():
                    self._spread(held.get(f"{moment}.{name}"), tensor)
                step = torch.tensor(float(updates), device=self.device)
                self.optimizer.state[parameter] = {"step": step, **moments}

    def reset(self) -> None:
        """Begin with new moments."""
        self._tell("reset")
        self.optimizer, self.updates = self._optimizer(), 0

    def end(self) -> None:
        self._tell("end")

    def follow(self) -> None:
        """Make the leader's calls until it ends. For the other ranks."""
        while True:
            head, _, body = self.ranks.broadcast(None).partition(b"\n")
            call, arguments, shape = json.loads(head)
            if call == "end":
                return
            assert call in CALLS, call
            ids = [torch.frombuffer(bytearray(body), dtype=torch.int64).view(shape)] if shape else []
            with suppress(DivergedError):  # the leader raises it, too, and says it
                getattr(self, call)(*ids, **arguments)

    def _tell(self, call: str, ids: Tensor | None = None, **arguments: float) -> None:
        if self.ranks.size > 1 and self.ranks.leads:
            head = json.dumps([call, arguments, [] if ids is None else list(ids.shape)]).encode()
            self.ranks.broadcast(head + b"\n" + (b"" if ids is None else ids.numpy().tobytes()))

    def _gradients(self, ids_BT: Tensor) -> float:
        """Compute the gradients of the step's mean loss, a micro-batch at a time. Return the loss."""
        total = torch.zeros(1, device=self.device)
        for micro_MT in self._micro_batches(ids_BT)[self.ranks.rank :: self.ranks.size]:
            loss = self._loss(micro_MT) * (len(micro_MT) / len(ids_BT))
            total += loss.detach()
            loss.backward()  # type: ignore[no-untyped-call]
        return self.ranks.sum({"loss": float(total)})["loss"]

    def _loss(self, ids_BT: Tensor) -> Tensor:
        """Mean over the sequences' tokens but their first."""
        ids_BT = ids_BT.to(self.device)

        def compute(model: Any) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())

        result: Tensor = self.root(compute)
        return result

    def _micro_batches(self, ids_BT: Tensor) -> list[Tensor]:
        return list(torch.split(ids_BT, self.settings.micro_batch))

    def _check_shares(self) -> None:
        batch, size, ranks = self.settings.batch, self.settings.micro_batch, self.ranks.size
        if (count := -(-batch // size)) % ranks:
            raise ConfigError(
                f"pretrain.batch = {batch} is {count} micro-batches of pretrain.micro_batch = {size}, which {ranks} ranks "
                "cannot share evenly: lower pretrain.micro_batch, or start another number of ranks"
            )

    @torch.no_grad()
    def _spread(self, held: Tensor | None, into: Tensor) -> None:
        """Set `into`, which may be sharded, to the leader's `held`. All ranks must call it."""
        if self.ranks.size == 1:
            assert held is not None
            into.copy_(held)
            return
        import torch.distributed as dist

        result = torch.empty(into.shape, device=self.device) if held is None else held.to(self.device).contiguous()
        dist.broadcast(result, src=0)
        local(into).copy_(result[own_rows(into)] if isinstance(into, DTensor) else result)

    def _optimizer(self) -> torch.optim.AdamW:
        settings = self.settings
        return torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.lr,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
