"""Reports each step: its metrics, and a signed record of the groups that it trained on. Also signs checkpoints.

Invariant: a metric that is unknown or not finite is left out. docs/pages.md lists the names. The coordinator adds
`reward/mean` and `reward/zero_std_frac`, because only the coordinator knows the groups that were not trained on. The record
identifies files and weights by digest. So an auditor with the accepted files can check what a step trained on, and a
machine that computes the same bits can reproduce the weights.

Training on one group (a prompt of P tokens, completions of L_1..L_G, N trained tokens) takes these FLOPs. The prompt
counts once:

    tokens    S = P + sum(L)                               positions that go through the body
    pairs     K = P(P+1)/2 + sum( L*P + L(L+1)/2 )         query-key pairs that attention computes
    forward   2*body*S + 2*head*N + 4*layers*width*K       a factor 2 for multiply and add; another 2 for QK^T and AV
    training  3 * forward                                  the backward pass computes twice as many products

The source is PaLM (arXiv 2204.02311, appendix B), whose formula is 6N + 12LHQT per token. Here the tree's pairs replace
T. As in PaLM, MFU does not count recomputation or padding.
Left out: embedding look-ups, norms, activations, softmax and the optimizer (together under 1 % at these sizes), and
mixtures of experts, where a token uses only some of the weights.
"""

import logging
import math
import platform
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.learner.groups import Fetched, Group
from shoal.protocol.identity import Signed
from shoal.protocol.messages import BatchGroup, CheckpointRecord, Computed, StepRecord
from shoal.protocol.node import Node

if TYPE_CHECKING:
    from shoal.learner.policy import Policy

PER_TOKEN = "policy/"  # prefix of the sums that become means per token
LAST = "optim/lr"  # this metric is taken from a step's last update, not averaged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """The sizes that determine a model's FLOPs."""

    body: int  # parameters of the matrices between embedding and head
    head: int  # parameters of the output projection, tied or not
    layers: int
    width: int  # attention heads x head size


def shape_of(model: Any) -> Shape:
    """Return the shape of a dense `transformers` causal LM. Layers without attention count as if they had it."""
    config, head = model.config.get_text_config(decoder=True), model.get_output_embeddings().weight
    ends = {id(head), id(model.get_input_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in ends]
    heads = getattr(config, "num_attention_heads", 0) or 0
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return Shape(
        body=sum(p.numel() for p in matrices), head=head.numel(), layers=config.num_hidden_layers, width=heads * size
    )


def forward_flops(shape: Shape, prompt: int, completions: Sequence[int], trained: int | None = None) -> float:
    """Return the floating-point operations of one forward pass over a tree of these token lengths (formula above).

    `trained` is the number of completion tokens that are trained on; None means all.
    """
    length = sum(completions)
    trained = length if trained is None else trained
    pairs = prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in completions)
    return 2.0 * (shape.body * (prompt + length) + shape.head * trained) + 4.0 * shape.layers * shape.width * pairs


def training_flops(shape: Shape, groups: Sequence[Group], *, extra_forwards: int) -> float:
    """Return the floating-point operations of training on these groups.

    `extra_forwards` is the number of forward passes without gradient per training pass, e.g. 1 for a reference model.
    """
    forward = sum(forward_flops(shape, len(g.prompt), [len(c) for c in g.completions], g.n_tokens) for g in groups)
    return (3 + extra_forwards) * forward


def batch_metrics(fetched: Fetched, step: int, *, max_tokens: int) -> dict[str, float]:
    """Return metrics of the groups that the step trained on, and counts of groups left out.

    A skipped step has only the counts. Lengths count the tokens that the model wrote. A completion of `max_tokens` or
    more counts as truncated. A group's age is the number of policy versions between the version that sampled it and the
    version trained at `step`.
    """
    metrics = {
        "data/quarantined": float(fetched.quarantined),
        "data/implausible": float(fetched.implausible),
        "data/foreign": float(fetched.foreign),
        "async/refused": float(fetched.refused),
    }
    groups = fetched.groups
    if not groups:
        return metrics
    ages = [step - group.policy_version for group in groups]
    truncated = [len(completion) >= max_tokens for group in groups for completion in group.completions]
    turns = [len(turns) // 2 + 1 for group in groups for turns in group.turns or [[]] * len(group.completions)]
    return metrics | {
        "reward/batch_mean": statistics.fmean(reward for group in groups for reward in group.rewards),
        "reward/std": statistics.fmean(statistics.pstdev(group.rewards) for group in groups),
        "completion/length_mean": statistics.fmean(length for group in groups for length in group.trained),
        "completion/truncated_frac": statistics.fmean(truncated),
        "completion/turns_mean": statistics.fmean(turns),
        "async/staleness_mean": statistics.fmean(ages),
        "async/staleness_max": float(max(ages)),
    }


def update_metrics(updates: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Combine the metrics of a step's updates, each given as (trained tokens, result of `Policy.update`).

    `policy/...` are sums over tokens and become means per token, or are left out if no token was trained. `optim/lr` is
    taken from the last update. Everything else becomes the mean over the updates.
    """
    metrics = {"optim/skipped": 0.0}
    n_tokens = sum(n for n, _ in updates)
    for name in updates[0][1]:
        values = [figures[name] for _, figures in updates]
        if name.startswith(PER_TOKEN):
            if n_tokens:
                metrics[name] = sum(values) / n_tokens
        else:
            metrics[name] = values[-1] if name == LAST else statistics.fmean(values)
    return metrics


def speed_metrics(
    *, n_tokens: int, flops: float, train_s: float, busy_s: float, waiting_s: float, peak_gflops: float
) -> dict[str, float]:
    """Return the step's speed. `train_s` is the part of `busy_s` that updates took.

    Tokens per second count the whole step, waiting included. MFU counts only `train_s`, and compares the speed with
    `peak_gflops`, that of a matrix product.
    """
    return {
        "perf/tokens": float(n_tokens),
        "perf/tokens_per_s": n_tokens / (busy_s + waiting_s),
        "perf/mfu": flops / train_s / (peak_gflops * 1e9),
        "perf/busy_s": busy_s,
        "perf/waiting_s": waiting_s,
    }


def memory_metrics(device: str) -> dict[str, float]:
    """Return the peak memory of this process, and on CUDA also the peak memory of tensors on `device`."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes on macOS, and KiB on Linux
    metrics = {"memory/rss_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes)}
    if device.startswith("cuda"):
        metrics["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return metrics


def sync_metrics(version: Path, seconds: float) -> dict[str, float]:
    """Return the size of the published folder `version`, without deltas, and the seconds that it took to write."""
    size_bytes = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
    return {"sync/bytes": float(size_bytes), "sync/seconds": seconds}


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Drop metrics that are not finite, which the coordinator would refuse, and log each of them."""
    for name, value in figures.items():
        if not math.isfinite(value):
            log.error("metric %s is %s and is left out", name, value)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


# --- signed records ------------------------------------------------------------------------------------------------------

DOMAIN, CHECKPOINT = "trained", "checkpoint"
SIGNED = "signed.json"  # a file in a checkpoint's folder
CPUINFO = Path("/proc/cpuinfo")


def signed_record(node: Node, step: int, fetched: Fetched, before: str, after: str, policy: "Policy") -> str:
    """Return one step's StepRecord, signed, as JSON. `before` and `after` are digests of the weights."""
    used = dict.fromkeys(group.submission for group in fetched.groups)
    record = StepRecord(
        run=node.invite.run,
        step=step,
        groups=[BatchGroup(submission=group.submission, group=group.number) for group in fetched.groups],
        files={submission: fetched.contents[submission] for submission in used},
        before=before,
        after=after,
        computed=computed(policy),
    )
    return Signed.make(node.identity, record.model_dump_json(), domain=DOMAIN).model_dump_json()


def sign_folder(node: Node, folder: Path, step: int, files: dict[str, str]) -> None:
    """Write SIGNED into a checkpoint's folder: the BLAKE3 digests of its files, signed by the learner."""
    record = CheckpointRecord(run=node.invite.run, step=step, files=files)
    signed = Signed.make(node.identity, record.model_dump_json(), domain=CHECKPOINT)
    (folder / SIGNED).write_text(signed.model_dump_json())


def computed(policy: "Policy") -> Computed:
    """Describe how this process computes. Processes with equal descriptions compute equal bits.

    Processes with different descriptions may compute equal bits, too.
    """
    return Computed(
        dtype="bfloat16" if policy.compute is torch.bfloat16 else "float32",
        threads=torch.get_num_threads(),
        ranks=policy.ranks.size,
        torch=torch.__version__,
        machine=_machine(policy.device)[:200],
    )


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {cpu}"
