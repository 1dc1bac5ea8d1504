"""A submission is judged by the limits of the engine and device that its signed header names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.validator.checks import logprobs, sampling, special_tokens, termination
from shoal.validator.spending import spent
from shoal.worker.produce import Producer

from ..workers import produced
from .support import ASKED, SETTINGS, case_of, config, make_producer, make_validator

pytestmark = pytest.mark.usefixtures("one_thread")

MARGIN = SETTINGS.validator.sampling_margin
WIDE = {"sampling_margin": 4 * MARGIN, "logprob_error_mean": 1.0}
FIGURES = dict.fromkeys(
    ("proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean", "distribution_evidence"), 0.0
)


@pytest.mark.parametrize(("kind", "found"), [("vllm/cpu", False), ("", True), ("vllm/cuda", True)])
def test_each_engine_has_its_own_limits(tiny_folder: Path, kind: str, found: bool) -> None:
    settings = config(validator={"limits": {"vllm/cpu": WIDE}, "sampling_margin_mean": 1e6})
    judge = make_validator(tiny_folder, settings).judge
    worker: Any = make_producer(tiny_folder, settings)
    worker.kind = kind
    data = Producer.sign(worker, ASKED, [worker.prompt(plan) for plan in worker.plan(ASKED)], produced(worker, ASKED))
    case = judge.prefill([case_of(judge, ASKED, data)])[0]
    assert case.header.engine == kind
    prefill = case.computed()
    off = replace(prefill, margins_N=prefill.margins_N + 2 * MARGIN, logprobs_N=prefill.logprobs_N - 0.5)
    case = replace(case, prefill=off)
    assert judge.rules is not None
    for check in (sampling, logprobs):
        assert (check(judge.rules, case).finding is not None) == found, check.__name__
    assert termination(judge.rules, case) and special_tokens(judge.rules, case)
    beyond = spent(judge.grade(case), settings, FIGURES).beyond[-1]
    assert (beyond > 0) == found, "the tests over many submissions count in the same unit"
