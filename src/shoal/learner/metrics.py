"""What one step tells of itself: pure functions from its groups, its updates, its seconds and its model to named numbers.

Invariant: a figure that a step cannot know is left out, never made up; what is told of a skipped update, which may be no
number, is in none. Names are those of docs/metrics.md; a step's metrics are these functions' answers, joined. Called by
the learner's loop once a step. The coordinator adds `reward/mean` and `reward/zero_std_frac`, for it alone knows the groups
that were not trained on.

FLOPs of training on one group (a prompt of P tokens, completions of L_1..L_G), with prompt and head counted once:

    tokens    S = P + sum(L)                               positions that go through the body
    pairs     K = P(P+1)/2 + sum( L*P + L(L+1)/2 )         positions that attention lets see each other
    forward   2*body*S + 2*head*sum(L) + 4*layers*width*K  2 for multiply and add; attention: QK^T and AV
    training  3 * forward                                  the backward pass takes two products for each of the forward's

Source: PaLM (arXiv 2204.02311, appendix B), whose 6N + 12LHQT a token this is, with the tree's own pairs in place of T. MFU
is as there: recomputation and padding are no useful work. Left out: embedding look-ups, norms, activations, softmax, the
optimizer (under 1 % together at these sizes); mixtures of experts, of which a token uses a part.
"""

import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.learner.groups import Group

PER_TOKEN = "policy/"
LAST = "optim/lr"  # of a step's updates the last one's value is told
SKIPPED = "optim/skipped"


@dataclass(frozen=True)
class Shape:
    """What a model's FLOPs depend on."""

    body: int  # parameters of matrices that every position goes through
    head: int  # parameters of the output projection, tied or not
    layers: int
    width: int  # of attention: heads x size of one


def shape_of(model: Any) -> Shape:
    """The shape of a dense causal language model of `transformers`."""
    config, head = model.config, model.get_output_embeddings().weight
    ends = {id(head), id(model.get_input_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in ends]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        body=sum(p.numel() for p in matrices),
        head=head.numel(),
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * size,
    )


def forward_flops(shape: Shape, prompt: int, completions: Sequence[int]) -> float:
    """Floating-point operations of one forward over a tree of these lengths, in tokens; formula above."""
    trained = sum(completions)
    pairs = prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in completions)
    return 2.0 * (shape.body * (prompt + trained) + shape.head * trained) + 4.0 * shape.layers * shape.width * pairs


def training_flops(shape: Shape, groups: Sequence[Group], *, extra_forwards: int) -> float:
    """Floating-point operations that training on these groups takes.

    `extra_forwards`: passes without gradient beside each training pass (1 for a reference model; 1 more where the
    behaviour's logprobs are computed again).
    """
    forward = sum(forward_flops(shape, len(g.prompt), [len(c) for c in g.completions]) for g in groups)
    return (3 + extra_forwards) * forward


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of the groups trained on. Rewards lie in whatever range the tasks give."""
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "reward/batch_mean": statistics.fmean(rewards),
        "reward/std": statistics.fmean(statistics.pstdev(group.rewards) for group in groups),
    }


def completion_metrics(groups: Sequence[Group], *, max_tokens: int) -> dict[str, float]:
    """Lengths in tokens; truncated: as long as a completion may get."""
    lengths = [len(completion) for group in groups for completion in group.completions]
    return {
        "completion/length_mean": statistics.fmean(lengths),
        "completion/truncated_frac": sum(length >= max_tokens for length in lengths) / len(lengths),
    }


def age_metrics(groups: Sequence[Group], step: int, *, refused: int) -> dict[str, float]:
    """Policy versions between what sampled a group and what is trained at `step`; `refused`: groups, for their age."""
    ages = [step - group.policy_version for group in groups]
    return {
        "async/staleness_mean": statistics.fmean(ages),
        "async/staleness_max": float(max(ages)),
        "async/refused": float(refused),
    }


def update_metrics(updates: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """A step's optimizer updates, each as the tokens computed for it and what `Policy.update` told.

    `policy/...` are sums over tokens and become means a token; `optim/lr` is the last one's; all else, the mean of the
    updates that were made. An update that tells `optim/skipped` = 1 counts there and nowhere else. Means a token are
    left out where no token was computed.
    """
    made = [(n_tokens, told) for n_tokens, told in updates if not told.get(SKIPPED)]
    metrics = {SKIPPED: float(len(updates) - len(made))}
    if not made:
        return metrics
    n_tokens = sum(n for n, _ in made)
    for name in made[0][1]:
        values = [told[name] for _, told in made]
        if name.startswith(PER_TOKEN):
            if n_tokens:
                metrics[name] = sum(values) / n_tokens
        elif name != SKIPPED:
            metrics[name] = values[-1] if name == LAST else statistics.fmean(values)
    return metrics


def speed_metrics(
    *, n_tokens: int, flops: float, train_s: float, busy_s: float, waiting_s: float, peak_gflops: float
) -> dict[str, float]:
    """How fast the step was. `train_s`: of `busy_s`, what the updates took; `peak_gflops`: of a matrix product here.

    Tokens per second count the whole step, waiting included; MFU counts `train_s` alone.
    """
    return {
        "perf/tokens": float(n_tokens),
        "perf/tokens_per_s": n_tokens / (busy_s + waiting_s),
        "perf/mfu": flops / train_s / (peak_gflops * 1e9),
        "perf/busy_s": busy_s,
        "perf/waiting_s": waiting_s,
    }


def memory_metrics(device: str) -> dict[str, float]:
    """The most memory this process held so far; on CUDA also the most that tensors held on `device`."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of macOS counts bytes, Linux's KiB
    metrics = {"memory/rss_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes)}
    if device.startswith("cuda"):
        metrics["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return metrics


def sync_metrics(version: Path, seconds: float) -> dict[str, float]:
    """Of publishing the folder `version`: its size, before deltas make what travels smaller, and how long it took."""
    size_bytes = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
    return {"sync/bytes": float(size_bytes), "sync/seconds": seconds}
