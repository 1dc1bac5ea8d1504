"""The policy being trained: a model, its fp32 masters, its optimizer, and one update.

The optimizer updates fp32 masters. The model holds the masters rounded to bf16, as published, in this machine's compute
dtype. So gradients are taken at exactly the weights that workers sample with. At RL learning rates an update is smaller
than a bf16 step, so gradients at the masters would be those of a policy that no worker samples from.
Invariant: between updates the model equals the rounded masters. An update happens completely or not at all, on all ranks.
Called by the learner's loop and by supervised fine-tuning (`sft`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.recipe import LearnerSection
from shoal.errors import ShoalError
from shoal.learner import lora, optimizers, out_of_memory
from shoal.learner.balance import cost, order, waiting
from shoal.learner.batch import MicroBatch
from shoal.learner.guard import judge
from shoal.learner.loss import policy_loss
from shoal.learner.masters import collect, collect_early, in_shards, prepare, round_
from shoal.learner.metrics import shape_of
from shoal.learner.ranks import Ranks, whole
from shoal.learner.schedule import rate
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, load_tokenizer, stored_shapes
from shoal.model.logprobs import LossOf
from shoal.model.numerics import Numerics, packs
from shoal.model.training import Scorer, compile_blocks, recompute_activations
from shoal.model.tree import Pack, Tree, pack

log = logging.getLogger(__name__)


class DivergedError(ShoalError):
    """The guard refused a loss or gradient norm. Nothing was updated."""


class Policy:
    def __init__(
        self,
        folder: Path,
        config: LearnerSection,
        dtype: DtypeName,
        device: str,
        temperature: float,
        ranks: Ranks | None = None,
        numerics: Numerics = "fast",
    ) -> None:
        if config.compile:
            numerics = "fast"  # compiled kernels sum in an order of their own
        self.config = config
        self.device = torch.device(device)
        self.offloads = config.offload and self.device.type != "cpu"
        self.compute = getattr(torch, dtype)
        self.temperature = temperature
        self.ranks = ranks or Ranks()
        self.tokenizer = load_tokenizer(folder)
        self.sharded = in_shards(folder, device, numerics, self.ranks)
        self.model = self._model(folder, numerics, "cpu" if self.offloads else device)
        if config.lora is not None:
            lora.attach_(self.model, config.lora)
        self.stored = stored_shapes(self.model)  # of a published version
        self.shape = shape_of(self.model)
        self.scorer = Scorer(self.model)
        self.masters = self._prepare(self.scorer, offload=self.offloads)
        self.weights = {name: dict(self.model.named_parameters())[name] for name in self.masters}
        if self.ranks.size == 1:
            collect_early(self.weights, self.masters)
        if config.activation_checkpointing:
            recompute_activations(self.scorer)
        if config.compile:
            compile_blocks(self.scorer)
        self.reference: Scorer | None = None
        if config.loss.beta > 0:
            self.reference = Scorer(self._model(folder, numerics, device).requires_grad_(False))
            self._prepare(self.reference)
        self.matrices = optimizers.matrices(config, self.weights, self.scorer.layers)
        self.optimizer = optimizers.make(config, self.masters, self.matrices, self.compute, self.device)
        self._costs: list[float] = []  # of the next update's rows, as they were dealt to the ranks
        self.updates = 0  # optimizer steps so far
        self.skipped_in_row = 0
        self.before_update: Callable[[], None] = lambda: None  # waits until a checkpoint is written

    def _model(self, folder: Path, numerics: Numerics, device: str) -> Any:
        """The model in float32, or a skeleton that `_prepare` fills."""
        return self.sharded.skeleton() if self.sharded else load_model(folder, "float32", device, numerics)

    def _prepare(self, scorer: Scorer, *, offload: bool = False) -> dict[str, Tensor]:
        return prepare(scorer, self.ranks, self.sharded, self.compute, self.stored, self.device, offload=offload)

    def update(self, micro_batches: Sequence[MicroBatch], denominator: float) -> dict[str, float]:
        """One optimizer step on micro-batches whose losses are sums over `denominator`. Returns sums and norms."""
        return self.apply(self.gradients(micro_batches), denominator)

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Add the gradients of the micro-batches' sums to those of the next update. Returns this rank's sums.

        All ranks pass all of them.
        """
        costs = [cost(micro, self.shape) for micro in micro_batches]
        dealt = order(costs, self.ranks.size)
        own = self.ranks.scatter([micro_batches[number] for number in dealt])
        return self.add(own, [costs[number] for number in dealt])

    def add(
        self, own: Iterable[MicroBatch | None], costs: Sequence[float], *, referenced: bool = False
    ) -> dict[str, float]:
        """Add the gradients of this rank's `own` micro-batches' sums; None: it idles. Returns this rank's sums.

        `costs`: of all ranks' micro-batches, as they were dealt. `referenced`: all of them have the reference's logprobs.
        """
        sums = dict.fromkeys(SUMMED, 0.0)

        def loss(micro: MicroBatch | None) -> Tensor:
            if micro is None:
                return self._idle(referenced=referenced)
            value, terms = self._loss(micro)
            for name, amount in terms.items():
                sums[name] += amount
            return value

        self._costs += costs
        return {LOSS: self._backward(loss, own)} | sums

    def step(self, loss: Callable[[Any], Tensor], batches: Sequence[Any]) -> dict[str, float]:
        """One optimizer step on the sum of `loss` over `batches`. Raises DivergedError before any change."""
        own = self.ranks.scatter(batches)
        return self.apply({LOSS: self._backward(lambda one: self._idle() if one is None else loss(one), own)}, 1.0)

    @torch.no_grad()
    def total(self, loss: Callable[[Any], Tensor], batches: Sequence[Any]) -> float:
        """The sum of `loss` over `batches`, on every rank. Nothing is updated."""
        own = self.ranks.scatter(batches)
        found = sum(float(self._idle() if one is None else loss(one)) for one in own)
        self.ranks.reshard(self.scorer)
        return self.ranks.sum({LOSS: found})[LOSS]

    def _backward(self, loss: Callable[[Any], Tensor], own: Iterable[Any]) -> float:
        """Add the gradients of `loss` over this rank's batches to the masters'. Returns this rank's sum of losses."""
        total = 0.0
        for batch in own:
            with out_of_memory.explained(self.config):
                value = loss(batch)
                value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        if self.ranks.size > 1:  # FSDP sums the gradients of its shards itself, in float32
            collect(self.weights, self.masters)
        return total

    def forget(self) -> None:
        """Drop the gradients of the next update."""
        self.optimizer.zero_grad(set_to_none=True)
        self._costs = []

    def apply(self, sums: Mapping[str, float], denominator: float) -> dict[str, float]:
        """Divide loss and gradients by `denominator`, clip, and update. Returns all ranks' `sums` and the norms.

        Because the division comes last, rows can be computed before the denominator is known, with the same bits.
        Raises DivergedError before any change.
        """
        found = self.ranks.sum(sums)
        total = found[LOSS] / denominator
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = float(whole(torch.nn.utils.get_total_norm(gradients))) / denominator
        scale = min(1.0, self.config.grad_clip / (norm + 1e-6)) / denominator
        for gradient in gradients:
            gradient.mul_(scale)
        decision = judge(self.updates, total, norm, self.config.guard, skipped_in_row=self.skipped_in_row)
        figures = found | {LOSS: total, "optim/grad_norm": norm, "optim/lr": self.lr, "optim/skipped": 0.0}
        figures["perf/ranks_idle"] = waiting(self._costs, self.ranks.size)
        if decision.action == "update":
            self._update_masters()
        self.forget()  # now, so that gradients take no memory while waiting
        if decision.action == "stop":
            raise DivergedError(decision.why)
        if decision.action == "skip":
            log.warning(decision.why)
            self.skipped_in_row += 1
            return figures | {"optim/skipped": 1.0}
        self.skipped_in_row = 0
        return figures

    @property
    def trained(self) -> int:
        """How many parameters are trained, on all ranks together."""
        return sum(master.numel() for master in self.masters.values())

    @property
    def packs(self) -> bool:
        """Whether rows may hold several sequences."""
        return packs(self.model)

    @property
    def lr(self) -> float:
        """The next update's learning rate."""
        return rate(self.updates, self.config)

    def _update_masters(self) -> None:
        self.before_update()
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.optimizer.step()
        self.round()
        self.updates += 1

    def round(self) -> None:
        """Set the model to the masters, rounded to bf16."""
        round_(self.weights, self.masters)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a version, one at a time: (name, bf16 tensor on the CPU). All ranks must iterate over it.

        Only the leader gets them; other ranks send it their shards, and get the names.
        """
        tensors = self.model.state_dict()
        for name in self.stored:
            found = self.ranks.gathered(tensors[name], torch.bfloat16)
            yield name, torch.empty(0) if found is None else found

    def logprobs(self, packed: Pack, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """The policy's logprobs of the pack's completion tokens, with gradient, and the entropies if requested."""
        found: tuple[Tensor, Tensor | None] = self.scorer(packed.to(self.device), self.temperature, with_entropy)
        return found

    def summed(self, packed: Pack, loss_of: LossOf, *, with_entropy: bool = False) -> Tensor:
        """The sum of `loss_of` over slices of those tokens, with gradient: logits exist for one slice at a time."""
        loss: Tensor = self.scorer(packed.to(self.device), self.temperature, with_entropy, loss_of)
        return loss

    @torch.no_grad()
    def recompute_behaviour(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with this policy's logprobs as behaviour. Other ranks' micro-batches are unchanged."""
        found = list(micro_batches)
        costs = [cost(micro, self.shape) for micro in micro_batches]
        for number in self.ranks.scatter(order(costs, self.ranks.size)):
            own_N = self.own_logprobs(None if number is None else found[number])
            if number is not None:
                found[number] = replace(found[number], behaviour_N=own_N)
        return found

    @torch.no_grad()
    def own_logprobs(self, micro: MicroBatch | None) -> Tensor:
        """This policy's logprobs of the row's targets, on the CPU. All ranks call it; those that idle with None."""
        with out_of_memory.explained(self.config):
            return self.logprobs(IDLE if micro is None else micro.pack)[0].cpu()

    def reference_logprobs(self, micro: MicroBatch | None) -> Tensor:
        """The reference's, which must exist; otherwise like `own_logprobs`."""
        with out_of_memory.explained(self.config):
            found = self._reference_logprobs(IDLE if micro is None else micro.pack)
        assert found is not None
        return found.cpu()

    def _idle(self, *, referenced: bool = False) -> Tensor:
        """A loss of 0 by the same calls in the same order, for a rank that has no micro-batch left while others have."""
        if not referenced:
            self._reference_logprobs(IDLE)
        return self.logprobs(IDLE)[0].sum() * 0.0

    @torch.no_grad()
    def _reference_logprobs(self, packed: Pack) -> Tensor | None:
        return None if self.reference is None else self.reference(packed.to(self.device), self.temperature, False)[0]

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        """The sum over the row's targets to differentiate, and the sums to report."""
        settings = self.config.loss
        known_N = micro.reference_N
        reference_N = self._reference_logprobs(micro.pack) if known_N is None else known_N.to(self.device)
        behaviour_N, advantage_N, rollout_N = (
            of_N.to(self.device) for of_N in (micro.behaviour_N, micro.advantage_N, micro.rollout_N)
        )
        sums = dict.fromkeys(SUMMED, 0.0)

        def loss_of(targets: slice, logp_C: Tensor, entropy_C: Tensor | None) -> Tensor:
            terms = policy_loss(
                logp_C,
                behaviour_N[targets],
                advantage_N[targets],
                denominator=1.0,
                settings=settings,
                rollout_N=rollout_N[targets],
                reference_N=None if reference_N is None else reference_N[targets],
                entropy_N=entropy_C,
            )
            for name in SUMMED:
                sums[name] += getattr(terms, name.partition("/")[2])
            return terms.loss

        with_entropy = settings.entropy > 0
        if settings.kind == "gspo":  # a token's gradient depends on all of its rollout
            return loss_of(slice(None), *self.logprobs(micro.pack, with_entropy=with_entropy)), sums
        return self.summed(micro.pack, loss_of, with_entropy=with_entropy), sums


LOSS = "loss"
SUMMED = [f"policy/{name}" for name in ("clip_low", "clip_high", "clip_delta", "mismatch_kl", "entropy", "kl")]
ZEROS = dict.fromkeys([LOSS, *SUMMED], 0.0)
IDLE = pack([Tree([0], [[0]])])
