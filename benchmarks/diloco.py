"""DiLoCo against data-parallel training at equal tokens: a small llama on real text, many settings, one process.

    python benchmarks/diloco.py --steps 200 --width 64 --seeds 0 1 --out benchmarks/results/diloco.json

The text is the source of Python's standard library as installed here (PSF licence); a tenth of its files is held out. The
sites are simulated: they train in turn in this process, but offer, average, round and apply with the package's own code, and
the bytes are those of its files. Data-parallel training is one process with a batch n times as large, which is what n
devices that average gradients after every step compute; its bytes are those that a ring all-reduce of float32 gradients
sends, 2·(n−1)/n·4 per parameter and step. Every run that is already in the output file is left out.
"""

import argparse
import json
import math
import platform
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.config.sites import PretrainSection
from shoal.diloco.agreed import Agreed
from shoal.diloco.codec import Kind
from shoal.diloco.direct import Direct
from shoal.diloco.fragments import Fragments
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import Greeting, Terms
from shoal.diloco.site import Site
from shoal.files import write_file
from shoal.pretrain.outer import named
from shoal.pretrain.trainer import rate

VOCABULARY, TOKENS, BATCH = 512, 64, 4  # BATCH: sequences per step and site
HELDOUT_SEQUENCES = 128
TEXT_BYTES = 1_500_000


@dataclass(frozen=True)
class Setting:
    sites: int
    inner_steps: int  # 0: data-parallel
    kind: Kind = "fp32"
    fragments: int = 1
    delay: int = 0
    keep: float = 0.0


@dataclass(frozen=True)
class Size:
    width: int
    steps: int
    lr: float


GRID = [
    Setting(4, 0),
    Setting(4, 50, "fp16"),
    Setting(4, 50, "int8"),
    Setting(4, 50, "int4"),
    Setting(4, 50, "fp32"),
    Setting(2, 0),
    Setting(2, 50, "fp16"),
    Setting(1, 0),
    Setting(1, 50, "fp16"),
    Setting(4, 100, "fp16"),
    Setting(4, 50, "fp16", fragments=2, delay=5, keep=0.5),
    Setting(4, 50, "int4", fragments=2, delay=5, keep=0.5),
]


def text() -> tuple[str, str]:
    """To train on and held out: files in the order of their names' hashes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(
        Path(sysconfig.get_paths()["stdlib"], "asyncio").glob("*.py")
    )
    files.sort(key=lambda path: sha256(path.name.encode()).digest())
    tenth = len(files) // 10
    parts = files[tenth:], files[:tenth]
    train, held = ("\n".join(path.read_text(errors="replace") for path in part) for part in parts)
    return train[:TEXT_BYTES], held


def tokens() -> tuple[Tensor, Tensor]:
    train, held = text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        train[:300_000].splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    return tuple(torch.tensor(tokenizer.encode(part).ids) for part in (train, held[:100_000]))  # type: ignore[return-value]


def processor() -> str:
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def model(seed: int, width: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=True,
        )
    )


class Trainee:
    """A model, its AdamW, and the windows of the text that site `number` draws."""

    def __init__(self, train_N: Tensor, seed: int, numbers: list[int], size: Size) -> None:
        self.model, self.train_N, self.seed, self.numbers = model(seed, size.width), train_N, seed, numbers
        self.settings = PretrainSection(
            steps=size.steps, lr=size.lr, warmup_steps=size.steps // 10, final_lr=size.lr / 10
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.tensors = named(self.model)

    def step(self, step: int) -> None:
        ids_BT = torch.cat([self.window(step, number) for number in self.numbers])
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, self.settings)
        loss_of(self.model, ids_BT).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def window(self, step: int, number: int) -> Tensor:
        draw = torch.Generator().manual_seed((self.seed * 64 + number) * 1_000_003 + step)
        starts = torch.randint(len(self.train_N) - TOKENS, (BATCH,), generator=draw)
        return torch.stack([self.train_N[at : at + TOKENS] for at in starts.tolist()])


def loss_of(network: Any, ids_BT: Tensor) -> Tensor:
    logits_BTV = network(input_ids=ids_BT, use_cache=False).logits
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


@torch.no_grad()
def perplexity(network: Any, held_N: Tensor) -> float:
    sequences = held_N[: HELDOUT_SEQUENCES * TOKENS].view(-1, TOKENS)
    losses = [float(loss_of(network, part)) * len(part) for part in sequences.split(32)]
    return math.exp(sum(losses) / len(sequences))


def dense(setting: Setting, data: tuple[Tensor, Tensor], seed: int, size: Size) -> dict[str, Any]:
    trainee = Trainee(data[0], seed, list(range(setting.sites)), size)
    for step in range(size.steps):
        trainee.step(step)
    count = sum(tensor.numel() for tensor in trainee.tensors.values())
    sent = 2 * (setting.sites - 1) / setting.sites * 4 * count * size.steps
    return {"perplexity": perplexity(trainee.model, data[1]), "sent_bytes_per_site": round(sent), "parameters": count}


def sparse(setting: Setting, data: tuple[Tensor, Tensor], seed: int, size: Size) -> dict[str, Any]:
    trainees = [Trainee(data[0], seed, [number], size) for number in range(setting.sites)]
    shapes = {name: tuple(tensor.shape) for name, tensor in trainees[0].tensors.items()}
    every = setting.inner_steps // setting.fragments
    terms = Terms(
        Fragments(shapes, setting.fragments),
        rounds=size.steps // every,
        kind=setting.kind,
        sites=setting.sites,
        wait_s=1e9,
    )
    sent = received = 0
    with tempfile.TemporaryDirectory() as folder:
        first = Agreed.of(trainees[0].tensors, terms.fragments)
        meeting = Meeting(Path(folder), terms, {}, "benchmark", lambda: first)
        names = [f"site-{number}" for number in range(setting.sites)]
        exchanges = [Direct(meeting, name) for name in names]
        sites = [Site(each.name, terms, Agreed.of(trainees[0].tensors, terms.fragments)) for each in exchanges]
        for exchange in exchanges:
            exchange.join(Greeting(about={}, round=0, digests=first.digests))
        for step in range(1, size.steps + 1):
            for trainee in trainees:
                trainee.step(step - 1)
            last = step == size.steps
            if step % every == 0:
                offers = [site.offer(trainee.tensors) for site, trainee in zip(sites, trainees, strict=True)]
                for exchange, (digest, offered) in zip(exchanges, offers, strict=True):
                    exchange.offer(meeting.round, digest, offered)
                sent += len(offers[0][1])
            if step >= every and (step % every == setting.delay or last):
                for exchange, site, trainee in zip(exchanges, sites, trainees, strict=True):
                    found = exchange.outcome(site.round)
                    assert isinstance(found, tuple)
                    site.apply(trainee.tensors, *found, 0.0 if last else setting.keep)
                received += len(found[1])
        assert len({tuple(site.agreed.digests) for site in sites}) == 1
        for number, vector in enumerate(sites[0].agreed.parameters):  # what all agree on, whichever fragment came last
            terms.fragments.scatter_(trainees[0].tensors, number, vector)
    return {
        "perplexity": perplexity(trainees[0].model, data[1]),
        "sent_bytes_per_site": sent,
        "received_bytes_per_site": received,
        "rounds": terms.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = tokens()
    held: dict[str, Any] = {"runs": []}
    if arguments.out.exists():
        held = json.loads(arguments.out.read_text())
    held |= {
        "command": f"python benchmarks/diloco.py {' '.join(sys.argv[1:])}",
        "machine": {
            "cpu": processor(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": 1,
        },
        "train_tokens": len(data[0]),
        "tokens_per_step_and_site": BATCH * TOKENS,
    }
    done = {json.dumps([run["setting"], run["seed"], run["size"]]) for run in held["runs"]}
    size = Size(arguments.width, arguments.steps, arguments.lr)
    for seed in arguments.seeds:
        for setting in GRID:
            named_by = {"setting": asdict(setting), "seed": seed, "size": asdict(size)}
            if json.dumps(list(named_by.values())) in done or size.steps % max(1, setting.inner_steps):
                continue
            started_s = time.process_time()
            found = (sparse if setting.inner_steps else dense)(setting, data, seed, size)
            run = named_by | found | {"cpu_s": round(time.process_time() - started_s, 1)}
            held["runs"].append(run)
            write_file(arguments.out, (json.dumps(held, indent=1) + "\n").encode())
            print(f"{setting} seed {seed}: perplexity {found['perplexity']:.3f}, {run['cpu_s']} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
