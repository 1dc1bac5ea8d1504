"""Limits of one engine on one kind of device replace those of all, one by one."""

import pytest

from shoal.config import ConfigError, parse

OWN = {"engine": "vllm", "device": "cpu", "sampling_margin": 1.5}
VALIDATOR = {"sampling_margin": 0.5, "logprob_error_mean": 0.07, "limits": [OWN]}


def test_limits_of_an_engine_replace_those_of_all() -> None:
    section = parse({"validator": VALIDATOR}).validator
    own = section.of("vllm/cpu")
    assert (own.sampling_margin, own.logprob_error_mean) == (1.5, 0.07), "what it leaves out is as for all"
    assert section.of("").sampling_margin == section.of("vllm/cuda").sampling_margin == 0.5


def test_the_widest_limit_is_that_of_any_engine() -> None:
    narrow = {"engine": "vllm", "device": "cuda", "sampling_margin": 0.2, "logprob_error_mean": 0.1}
    section = parse({"validator": VALIDATOR | {"limits": [OWN, narrow]}}).validator
    assert (section.widest("sampling_margin"), section.widest("logprob_error_mean")) == (1.5, 0.1)
    assert section.widest("proof_mantissa_mean") == section.proof_mantissa_mean
    assert parse({"validator": {"sampling_margin": 0.5}}).validator.widest("sampling_margin") == 0.5


def test_the_torch_engines_limits_are_the_sections_own() -> None:
    """Its workers name no engine, so an entry for it would be a liar's alone."""
    with pytest.raises(ConfigError, match="limits.0.engine"):
        parse({"validator": {"limits": [{"engine": "torch", "device": "cuda", "sampling_margin": 9.0}]}})


def test_workers_take_the_engines_in_turn() -> None:
    workers = parse({"workers": {"engines": ["vllm", "torch"], "count": 3}}).workers
    assert [workers.engine(number) for number in range(3)] == ["vllm", "torch", "vllm"]
