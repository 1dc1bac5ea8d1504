"""The policy being trained: a model, its fp32 masters, its optimizer, and one update.

The optimizer updates fp32 masters. The model holds the masters rounded to bf16, as published, in this machine's compute
dtype. So gradients are computed at exactly the weights with which workers sample. Gradients at the masters would belong
to a policy from which no worker samples, because at RL learning rates an update is smaller than the distance between
two bf16 numbers.
The learning rate of update u = 0, 1, ... is lr (u + 1) / W during the warm-up of W updates, and then lr.

Invariant: between updates the model equals the rounded masters. An update happens on all ranks or not at all.
"""

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.recipe import LearnerSection
from shoal.errors import ShoalError, first_line
from shoal.files import commit_folder
from shoal.learner.batch import MicroBatch
from shoal.learner.loss import policy_loss
from shoal.learner.masters import attach_adapters_, collect, collect_early, in_shards, prepare, round_
from shoal.learner.ranks import Ranks, whole
from shoal.learner.report import shape_of
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, load_tokenizer, save_model, stored_shapes
from shoal.model.logprobs import LossOf
from shoal.model.numerics import Numerics
from shoal.model.training import Scorer, recompute_activations
from shoal.model.tree import Pack, Tree, pack

# For AdamW. The second moment averages over about 100 updates, because the policy changes. There is no weight decay,
# because pulling weights to 0 has no use in an RL run.
BETAS = (0.9, 0.99)

log = logging.getLogger(__name__)


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
        *,
        seed: int | None = None,
        betas: tuple[float, float] = BETAS,
        weight_decay: float = 0.0,
    ) -> None:
        """If `seed` is set, initialise random weights with it, instead of loading the weights from `folder`.

        `betas` and `weight_decay` are AdamW's.
        """
        self.config = config
        self.device = torch.device(device)
        self.compute = getattr(torch, dtype)
        self.temperature = temperature
        self.ranks = ranks or Ranks()
        self.tokenizer = load_tokenizer(folder)
        self.seed = seed
        self.sharded = in_shards(folder, device, numerics, self.ranks) if seed is None else None
        self.model = self._model(folder, numerics, device)
        if config.lora is not None:
            attach_adapters_(self.model, config.lora)
        self.stored = stored_shapes(self.model)  # shapes of the tensors in a published version
        self.shape = shape_of(self.model)
        self.scorer = Scorer(self.model)
        self.masters = self._prepare(self.scorer)
        self.weights = {name: dict(self.model.named_parameters())[name] for name in self.masters}
        if self.ranks.size == 1:
            collect_early(self.weights, self.masters)
        if config.activation_checkpointing:
            recompute_activations(self.scorer)
        self.reference: Scorer | None = None
        if config.loss.beta > 0:
            self.reference = Scorer(self._model(folder, numerics, device).requires_grad_(False))
            self._prepare(self.reference)
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=config.lr, betas=betas, weight_decay=weight_decay, fused=True
        )
        self.updates = 0  # optimizer steps so far
        self.rate: Callable[[], float] = self._warmed_up  # the next update's learning rate
        # The setting to lower if a row runs out of memory.
        self.memory_hint = f"learner.row_tokens (now {config.row_tokens})"
        self.before_update: Callable[[], None] = lambda: None  # waits until a checkpoint in progress is written

    def _model(self, folder: Path, numerics: Numerics, device: str) -> Any:
        """Return the model in float32, or an empty skeleton that `_prepare` fills."""
        return self.sharded.skeleton() if self.sharded else load_model(folder, "float32", device, numerics, self.seed)

    def _prepare(self, scorer: Scorer) -> dict[str, Tensor]:
        return prepare(scorer, self.ranks, self.sharded, self.compute, self.stored)

    def update(self, own: Iterable[MicroBatch | None], denominator: float) -> dict[str, float]:
        """Make one optimizer step of the RL loss. `own` yields this rank's micro-batches, and None while it idles.

        Return and raise as `apply` does.
        """
        return self.apply(self.accumulate(own), denominator)

    def accumulate(self, own: Iterable[MicroBatch | None]) -> dict[str, float]:
        """Accumulate the gradients of this rank's micro-batches for the next update. Return this rank's sums."""
        sums = dict.fromkeys(SUMMED, 0.0)

        def loss(micro: MicroBatch | None) -> Tensor:
            if micro is None:
                return self._idle()
            value, terms = self._loss(micro)
            for name, amount in terms.items():
                sums[name] += amount
            return value

        return {LOSS: self._backward(loss, own)} | sums

    def step(self, loss: Callable[[Any], Tensor], batches: Sequence[Any]) -> dict[str, float]:
        """Make one optimizer step on the sum of `loss` over `batches`. Return and raise as `apply` does."""
        own = self.ranks.scatter(batches)
        return self.apply(
            {LOSS: self._backward(lambda batch: self._idle() if batch is None else loss(batch), own)}, 1.0
        )

    @torch.no_grad()
    def total(self, loss: Callable[[Any], Tensor], batches: Sequence[Any]) -> float:
        """Return the sum of `loss` over `batches` on every rank, without an update."""
        own = self.ranks.scatter(batches)
        result = sum(float(self._idle() if batch is None else loss(batch)) for batch in own)
        self.ranks.reshard(self.scorer)
        return self.ranks.sum({LOSS: result})[LOSS]

    def _backward(self, loss: Callable[[Any], Tensor], own: Iterable[Any]) -> float:
        """Accumulate the gradients of `loss` over this rank's batches. Return this rank's sum of losses."""
        total = 0.0
        for batch in own:
            with explain_out_of_memory(self.config, self.memory_hint):
                value = loss(batch)
                value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        if self.ranks.size > 1:  # FSDP has summed the gradients over ranks, in float32
            collect(self.weights, self.masters)
        return total

    def apply(self, sums: Mapping[str, float], denominator: float) -> dict[str, float]:
        """Divide loss and gradients by `denominator`, clip the gradients, and update the masters.

        Return `sums` over all ranks, with the loss, the gradient norm and the learning rate. If the loss or the norm is
        not finite, raise ShoalError before any change.
        """
        result = self.ranks.sum(sums)
        total = result[LOSS] / denominator
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = float(whole(torch.nn.utils.get_total_norm(gradients))) / denominator
        scale = min(1.0, self.config.grad_clip / (norm + 1e-6)) / denominator
        for gradient in gradients:
            gradient.mul_(scale)
        figures = result | {LOSS: total, "optim/grad_norm": norm, "optim/lr": self.rate()}
        try:
            self._check_finite({"loss": total, "gradient norm": norm})
            self._update_masters()
        finally:
            self.optimizer.zero_grad(set_to_none=True)  # frees memory while waiting for the next batch
        return figures

    def _check_finite(self, figures: Mapping[str, float], effect: str = "nothing was updated") -> None:
        for name, value in figures.items():
            if not math.isfinite(value):
                raise ShoalError(
                    f"update {self.updates}: the {name} is {value}, not a finite number; {effect}: "
                    "lower the learning rate"
                )

    @property
    def trained(self) -> int:
        """Number of trained parameters over all ranks."""
        return sum(master.numel() for master in self.masters.values())

    def _warmed_up(self) -> float:
        warm_up = self.config.warmup_steps
        return self.config.lr * ((self.updates + 1) / warm_up) if self.updates < warm_up else self.config.lr

    def _update_masters(self) -> None:
        self.before_update()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.round()
        self.updates += 1

    def round(self) -> None:
        """Set the model to the masters, rounded to bf16."""
        round_(self.weights, self.masters)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a version: (name, bf16 tensor on the CPU). All ranks must iterate to the end.

        Only the leader gets tensors; the other ranks send it their shards and get empty tensors.
        """
        tensors = self.model.state_dict()
        for name in self.stored:
            result = self.ranks.gathered(tensors[name], torch.bfloat16)
            yield name, torch.empty(0) if result is None else result

    def write(self, final: Path, *, replace: bool = False) -> None:
        """Write the published model as a Hugging Face folder, atomically. All ranks must call it.

        If `replace` is set, replace an existing folder. Raise ShoalError on every rank if weights or logits are not
        finite.
        """
        self._check_usable()
        tensors = self.published()
        if self.ranks.leads:
            temporary = final.with_name(f".{final.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            save_model(self.model, self.tokenizer, temporary, tensors, self.stored)
            if replace:
                shutil.rmtree(final, ignore_errors=True)
            commit_folder(temporary, final)
        for _ in tensors:  # the other ranks take part in gathering each tensor
            pass

    @torch.no_grad()
    def _check_usable(self) -> None:
        """Raise ShoalError if no worker could sample from this policy."""
        norm = float(whole(torch.nn.utils.get_total_norm(list(self.masters.values()))))
        logprob = float(self.logprobs(PROBE)[0].sum())
        self.ranks.reshard(self.scorer)
        self._check_finite({"norm of the weights": norm, "logprob of a token": logprob}, "this version is not written")

    def logprobs(self, packed: Pack, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the logprobs of the pack's completion tokens, with gradient, and the entropies if requested."""
        result: tuple[Tensor, Tensor | None] = self.scorer(packed.to(self.device), self.temperature, with_entropy)
        return result

    def summed(self, packed: Pack, loss_of: LossOf, *, with_entropy: bool = False) -> Tensor:
        """Return the sum of `loss_of` over slices of the pack's completion tokens, with gradient.

        Logits exist for one slice at a time.
        """
        loss: Tensor = self.scorer(packed.to(self.device), self.temperature, with_entropy, loss_of)
        return loss

    @torch.no_grad()
    def own_logprobs(self, micro: MicroBatch | None) -> Tensor:
        """Return this policy's logprobs of the row's targets, on the CPU.

        All ranks must call it. Idle ranks pass None.
        """
        with explain_out_of_memory(self.config, self.memory_hint):
            return self.logprobs(IDLE if micro is None else micro.pack)[0].cpu()

    def _idle(self) -> Tensor:
        """Compute a loss of 0 with the collective calls of a real loss, on a rank that has no micro-batch left."""
        self._reference_logprobs(IDLE)
        return self.logprobs(IDLE)[0].sum() * 0.0

    @torch.no_grad()
    def _reference_logprobs(self, packed: Pack) -> Tensor | None:
        return None if self.reference is None else self.reference(packed.to(self.device), self.temperature, False)[0]

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the loss summed over the row's targets, and the sums to report."""
        settings = self.config.loss
        reference_N = self._reference_logprobs(micro.pack)
        behaviour_N, advantage_N, rollout_N = (
            tensor_N.to(self.device) for tensor_N in (micro.behaviour_N, micro.advantage_N, micro.rollout_N)
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
        if settings.kind == "gspo":  # a token's gradient depends on its whole rollout, so do not slice
            return loss_of(slice(None), *self.logprobs(micro.pack, with_entropy=with_entropy)), sums
        return self.summed(micro.pack, loss_of, with_entropy=with_entropy), sums


LOSS = "loss"
SUMMED = [f"policy/{name}" for name in ("clip_low", "clip_high", "clip_delta", "mismatch_kl", "entropy", "kl")]
IDLE = pack([Tree([0], [[0]])])
PROBE = pack([Tree([0], [list(range(8))])])  # tokens of which every vocabulary has at least these


# --- memory --------------------------------------------------------------------------------------------------------------


class OutOfMemoryError(ShoalError):
    """This machine or device has too little memory for a row. The message says which setting to lower."""

    restart_helps = True  # another process may have used the memory


@contextmanager
def explain_out_of_memory(config: LearnerSection, memory_hint: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        message = str(error)
        device_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        cpu_out_of_memory = "not enough memory" in message or "can't allocate memory" in message
        if isinstance(error, RuntimeError) and not device_out_of_memory and not cpu_out_of_memory:
            raise
        hint = "" if config.activation_checkpointing else " or set learner.activation_checkpointing = true"
        raise OutOfMemoryError(
            f"out of memory while computing a row: lower {memory_hint}{hint}; {first_line(error)}"
        ) from error
