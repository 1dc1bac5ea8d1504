"""The model and text of the DiLoCo benchmarks: a small llama and the source of Python's standard library.

The text is the standard library as installed here (PSF licence), without its tests. A tenth of its files is held out.
Weights and optimizer state are float32. Matrix products run in bfloat16 (`torch.autocast`) if `Size.autocast` is set.
"""

import copy
import math
import platform
import sysconfig
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.func import functional_call, vmap
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.config.sites import PretrainSection
from shoal.learner.pretrain.trainer import rate

HELDOUT_BYTES, TOKENIZER_BYTES = 100_000, 300_000


@dataclass(frozen=True)
class Size:
    steps: int
    lr: float
    width: int = 64
    layers: int = 2
    vocabulary: int = 512
    sequences: int = 4  # per step and random stream
    length: int = 64  # tokens of a sequence
    heldout: int = 128  # sequences
    text_bytes: int = 1_500_000
    autocast: bool = False


def text(size: Size) -> tuple[str, str]:
    """Return the training text and the held-out text. Files are sorted by hash; the first tenth is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in library.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts)]
    files.sort(key=lambda path: sha256(str(path.relative_to(library)).encode()).digest())
    tenth = len(files) // 10
    parts = files[tenth:], files[:tenth]
    train, held = ("\n".join(path.read_text(errors="replace") for path in part) for part in parts)
    return train[: size.text_bytes], held[:HELDOUT_BYTES]


def tokens(size: Size) -> tuple[Tensor, Tensor]:
    """Return token ids for training and held-out token ids. The byte-level BPE is trained on the start of the text."""
    train, held = text(size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        train[:TOKENIZER_BYTES].splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=size.vocabulary, initial_alphabet=alphabet, show_progress=False),
    )
    return tuple(torch.tensor(tokenizer.encode(part).ids) for part in (train, held))  # type: ignore[return-value]


def model(seed: int, size: Size) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=11 * size.width // 4,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=size.length,
            tie_word_embeddings=True,
        )
    )


class Trainee:
    """A model and its AdamW. Each of `numbers` names a random stream that chooses windows of the text for it."""

    def __init__(self, train_N: Tensor, seed: int, numbers: list[int], size: Size) -> None:
        self.model, self.train_N, self.seed, self.numbers, self.size = model(seed, size), train_N, seed, numbers, size
        self.settings = PretrainSection(steps=size.steps, lr=size.lr, warmup_steps=size.steps // 10)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.tensors = {name: parameter.data for name, parameter in self.model.named_parameters()}

    def step(self, step: int) -> None:
        ids_BT = torch.cat([self.window(step, number) for number in self.numbers])
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, self.settings)
        loss_of(self.model, ids_BT, self.size).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def window(self, step: int, number: int) -> Tensor:
        draw = torch.Generator().manual_seed((self.seed * 64 + number) * 1_000_003 + step)
        starts = torch.randint(len(self.train_N) - self.size.length, (self.size.sequences,), generator=draw)
        return torch.stack([self.train_N[at : at + self.size.length] for at in starts.tolist()])


class Trainees:
    """`count` copies of a trainee's weights and optimizer moments. Each trains on its share of the first `batch` streams.

    One pass (`torch.func.vmap`) computes all copies. It takes two thirds of the time of separate passes. In the names of
    tensors, the letter S stands for the sites.
    """

    def __init__(self, first: Trainee, count: int, batch: int) -> None:
        self.first, self.count, self.numbers = first, count, first.numbers[:batch]
        self.stacked = {name: torch.stack([tensor] * count).requires_grad_() for name, tensor in first.tensors.items()}
        self.tensors = [{name: own.detach()[site] for name, own in self.stacked.items()} for site in range(count)]
        self.optimizer = torch.optim.AdamW(self.stacked.values(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        for own, tensor in zip(self.stacked.values(), first.model.parameters(), strict=True):
            state = first.optimizer.state[tensor]
            self.optimizer.state[own] = {
                name: torch.stack([value] * count) if value.dim() else value.clone() for name, value in state.items()
            }
        self.network = copy.deepcopy(first.model)
        self.network.set_attn_implementation("eager")  # fused attention would get unequal dtypes here

    def step(self, step: int, scheduled: int) -> None:
        """Train on the sequences of `step`, with the learning rate of step `scheduled`."""
        ids_BT = torch.cat([self.first.window(step, number) for number in self.numbers])
        ids_SBT = ids_BT.view(self.count, -1, ids_BT.shape[-1])
        for group in self.optimizer.param_groups:
            group["lr"] = rate(scheduled, self.first.settings)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.first.size.autocast):
            logits_SBTV = vmap(self.logits)(self.stacked, ids_SBT)
        mean = F.cross_entropy(logits_SBTV[..., :-1, :].flatten(0, 2).float(), ids_SBT[..., 1:].flatten())
        (mean * self.count).backward()  # the sum of the sites' means
        gradients = [own.grad for own in self.stacked.values() if own.grad is not None]
        norms_S = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        for gradient in gradients:
            gradient.mul_((1 / (norms_S + 1e-6)).clamp(max=1).view(-1, *[1] * (gradient.dim() - 1)))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def logits(self, tensors: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
        return functional_call(self.network, tensors, (), {"input_ids": ids_BT, "use_cache": False}).logits


def loss_of(network: Any, ids_BT: Tensor, size: Size) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=size.autocast):
        logits_BTV = network(input_ids=ids_BT, use_cache=False).logits
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())


@torch.no_grad()
def perplexity(network: Any, held_N: Tensor, size: Size) -> float:
    sequences = held_N[: size.heldout * size.length].view(-1, size.length)
    losses = [float(loss_of(network, part, size)) * len(part) for part in sequences.split(32)]
    return math.exp(sum(losses) / len(sequences))


def processor() -> str:
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
