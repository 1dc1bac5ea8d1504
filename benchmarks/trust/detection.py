"""Measure how many tokens it takes to tell a lie about the computation or the sampling from honest work.

    python -m benchmarks.trust.detection configs/quickstart.toml --set sampling.max_tokens=96 --set tasks.system= \
        --set 'tasks.prompt="Write a short story about the numbers in {question}."'

A worker generates honestly and with each lie, in bf16, and a validator computes the same tokens in float32. So honest work
differs too, as between two kinds of machines. Each worker's tokens are cut into batches of 100, 300 and 1,000 consecutive
tokens. A batch's score is the mean of a figure over its tokens:

    margin    by how much the token that the seed yields outscores the written token, in nats, at most MOST
    logprob   the difference between the two logprobs, in nats
    mantissa  the mean mantissa error of the TOPLOC proofs of its chunks of 32 tokens

The AUC is the probability that a batch of the liar has a higher score than an honest batch; 0.5 is chance. DiFR (arXiv
2511.20621) reports the same measure for other models. Writes benchmarks/results/detection.json after each attack.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import RESULTS, about, save
from benchmarks.trust.adversary.attacks import ATTACKS, Attack, Lab
from benchmarks.trust.attacks import WORKERS, identity, make
from shoal import config, toploc
from shoal.cli.calibrate import RUN
from shoal.engine.torch_engine import TorchEngine
from shoal.model.sources import resolve
from shoal.store.columns import PROOF_CHUNK_TOKENS
from shoal.validator.case import Case
from shoal.validator.judge import Judge

LIES = ("int8_weights", "int4_weights", "fp8_cache", "temperature_x0.7", "temperature_x1.3", "top_p_0.9")
BATCHES = (100, 300, 1_000)  # tokens
MOST = 5.0  # nats; one impossible token does not outweigh a whole batch
Scores = dict[str, list[float]]  # a figure's values, by token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=int, default=12_000, help="tokens of each worker")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the config")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = config.load(arguments.config, [*arguments.set, "model.numerics=fast"])
    folder = resolve(settings.model.name)
    result: dict[str, Any] = {
        **about(),
        "model": settings.model.name,
        "tokens": arguments.tokens,
        "dtypes": ["bfloat16", "float32"],
        "lies": {},
    }
    with Judge(settings, RUN, "float32") as judge:
        judge.load(folder)
        engine = TorchEngine("bfloat16", settings.model.device, "fast")  # every worker reloads it
        honest: Scores = {}
        for name in ("honest", *LIES):
            worker = ATTACKS[name](settings, RUN, identity(0), engine, Lab([folder], neighbour=identity(WORKERS)))
            worker.load(folder, 0)
            scores = measure(judge, worker, settings, arguments.tokens)
            honest = honest or scores
            result["lies"][name] = {
                "mean": {figure: statistics.mean(values) for figure, values in scores.items()},
                "auc": {
                    figure: {
                        str(size): auc(batches(scores[figure], size), batches(honest[figure], size)) for size in BATCHES
                    }
                    for figure in scores
                },
            }
            save(RESULTS / "detection.json", result)
            sys.stdout.write(f"{name}: {result['lies'][name]}\n")
            sys.stdout.flush()


def measure(judge: Judge, worker: Attack, settings: config.Config, wanted: int) -> Scores:
    """Return each figure for the first `wanted` tokens that the worker writes."""
    scores: Scores = {"margin": [], "logprob": [], "mantissa": []}
    numbers = itertools.count()
    while len(scores["margin"]) < wanted:
        assignment, data, _ = make(worker, settings, next(numbers))
        opened = judge.open(assignment, worker.identity.public, data)
        assert isinstance(opened, Case), opened
        (case,) = judge.prefill([opened])
        prefill = case.computed()
        claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs])
        hiddens = list(torch.split(prefill.hidden_NH, prefill.lengths))
        proofs = toploc.verify_many(hiddens, [row.proofs for row in case.rows], chunk_tokens=PROOF_CHUNK_TOKENS)
        scores["margin"] += prefill.margins_N.clamp(max=MOST).tolist()
        scores["logprob"] += (claimed_N - prefill.logprobs_N).abs().tolist()
        for length, chunks in zip(prefill.lengths, proofs, strict=True):
            errors = [chunk.mantissa_error_mean for chunk in chunks for _ in range(PROOF_CHUNK_TOKENS)]
            scores["mantissa"] += errors[:length]
    return {figure: values[:wanted] for figure, values in scores.items()}


def batches(values: Sequence[float], size: int) -> list[float]:
    """Return the mean of each whole batch of `size` consecutive values."""
    return [statistics.fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Return the probability that a positive exceeds a negative; a tie counts half.

    >>> auc([2.0, 1.0], [0.0, 1.0])
    0.875
    """
    pairs = [(p > n) + (p == n) / 2 for p in positives for n in negatives]
    return sum(pairs) / len(pairs)


if __name__ == "__main__":
    main()
