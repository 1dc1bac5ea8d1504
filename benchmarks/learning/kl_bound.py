"""Compare bounds on the KL estimator k3: how does one token that became very unlikely change an update?

    python -m benchmarks.learning.kl_bound [--seeds 20]

The policy is a table of softmax rows. Its logits are the reference's plus a random drift. Tokens are drawn from the policy,
with advantages of 1 and -1. Each batch has one planted token, whose logprob under the policy is `outlier` nats below the
reference's, as after many updates against it. The batch's gradient is clipped to the recipe's norm. The result has for each
bound:

    share     norm of the planted token's gradient, divided by that of all other tokens together
    progress  the share of the other tokens' progress that remains (1: all of it)
    pull      whether the update makes the planted token more likely again
    kept      cosine between the KL gradients of this and of the unbounded estimator, both without the planted token

`tangent N` replaces the exponential by its tangent at N nats where the difference is larger. `verl` clips the difference to
20 and the value to 10, as that library does, so beyond these limits the gradient is zero. Writes
benchmarks/results/kl_bound.json.
"""

import argparse
import json
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.common.machine import RESULTS, about, save

ROWS, VOCABULARY, DRIFT = 64, 256, 1.0  # the drift is the std of a logit's change, in nats
GRAD_CLIP = 0.1
BETAS = (0.001, 0.04)
OUTLIERS = (8.0, 15.0)
TOKENS = (4096, 65536)
Estimator = Callable[[Tensor], Tensor]


def tangent(beyond: float) -> Estimator:
    def kl(d_N: Tensor) -> Tensor:
        over_N = (d_N - beyond).clamp(min=0)
        return torch.exp(d_N - over_N) * (1 + over_N) - d_N - 1

    return kl


def verl(d_N: Tensor) -> Tensor:
    d_N = d_N.clamp(-20, 20)
    return (torch.exp(d_N) - d_N - 1).clamp(-10, 10)


ESTIMATORS: dict[str, Estimator] = {f"tangent {at:g}": tangent(at) for at in (20.0, 10.0, 8.0, 5.0, 3.0)} | {
    "verl": verl
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = []
    for tokens in TOKENS:
        for beta in BETAS:
            for outlier in OUTLIERS:
                for name, kl in ESTIMATORS.items():
                    runs = [measure(seed, tokens, beta, outlier, kl) for seed in range(arguments.seeds)]
                    mean = {key: float(f"{fmean(run[key] for run in runs):.4g}") for key in runs[0]}
                    result.append({"tokens": tokens, "beta": beta, "outlier": outlier, "bound": name} | mean)
                    print(json.dumps(result[-1]))  # noqa: T201
    report = {
        **about(),
        "grad_clip": GRAD_CLIP,
        "cases": result,
    }
    save(RESULTS / "kl_bound.json", report)


def measure(seed: int, tokens: int, beta: float, outlier: float, kl: Estimator) -> dict[str, float]:
    draw = torch.Generator().manual_seed(seed)
    reference_RV = torch.randn(ROWS, VOCABULARY, generator=draw, dtype=torch.float64).mul(2).log_softmax(-1)
    logits_RV = reference_RV + DRIFT * torch.randn(ROWS, VOCABULARY, generator=draw, dtype=torch.float64)
    planted = int(reference_RV[0].argmax())
    # The token's logit x has log p = x - log(Z + e^x), where Z sums exp over the other logits. So x is log p + log Z, to
    # within 0.02 if log p is below -4.
    rest = torch.cat([logits_RV[0, :planted], logits_RV[0, planted + 1 :]]).logsumexp(0)
    logits_RV[0, planted] = reference_RV[0, planted] - outlier + rest
    logits_RV.requires_grad_()
    drawn_N = torch.multinomial(logits_RV.detach().softmax(-1).flatten(), tokens, replacement=True, generator=draw)
    row_N, token_N = drawn_N // VOCABULARY, drawn_N % VOCABULARY
    row_N[0], token_N[0] = 0, planted
    advantage_N = torch.randint(2, (tokens,), generator=draw).double() * 2 - 1
    one = torch.zeros(tokens, dtype=torch.bool)
    one[0] = True

    def gradient(of_N: Tensor, estimator: Estimator, surrogate: bool) -> Tensor:
        logp_N = logits_RV.log_softmax(-1)[row_N, token_N]
        loss_N = beta * estimator(reference_RV[row_N, token_N] - logp_N) - surrogate * advantage_N * logp_N
        (result,) = torch.autograd.grad((loss_N * of_N).sum() / tokens, logits_RV)
        return result

    own, others = gradient(one, kl, True), gradient(~one, kl, True)
    update, without = clipped(own + others), clipped(others)
    kept, unbounded = (gradient(~one, estimator, False).flatten() for estimator in (kl, ESTIMATORS["tangent 20"]))
    return {
        "share": float(own.norm() / others.norm()),
        "progress": float((update * others).sum() / (without * others).sum()),
        "pull": float(update[0, planted] < 0),
        "kept": float(torch.cosine_similarity(kept, unbounded, dim=0)),
    }


def clipped(gradient: Tensor) -> Tensor:
    return gradient * min(1.0, GRAD_CLIP / float(gradient.norm()))


if __name__ == "__main__":
    main()
