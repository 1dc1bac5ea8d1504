"""A whole run's time and memory, composed of given rates: no clock is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config, parse
from shoal.launch.cores import shares
from shoal.launch.estimate import START_S, Estimate, estimate, evaluation, expected_length, of_prepared
from shoal.plan import BUNDLED, Fleet, Links, memory_of, plan, work_of
from shoal.plan.devices import this_cpu
from shoal.plan.steps import rollouts_s
from shoal.view import figures
from shoal.view.figures import duration

CORES = 2
CPU = this_cpu(400e9, 10e9, 24e9, CORES)
SIZES = BUNDLED["bundled:smollm2-135m-instruct"]


def settings(**sections: dict[str, Any]) -> Config:
    return parse(
        {
            "model": {"name": "bundled:smollm2-135m-instruct"},
            "sampling": {"max_tokens": 12, "group_size": 8},
            "coordinator": {"prompts_per_step": 8, "async_level": 1},
            "learner": {"optimizer_steps_per_step": 1, "row_tokens": 1024, "loss": {"beta": 0.0}},
            "evaluator": {"n": 128, "batch": 64},
        }
        | sections
    )


def test_a_run_is_its_start_one_whole_round_the_other_steps_and_evaluations() -> None:
    config = settings()
    work = work_of(config, prompt=26, length=12, useful=0.5)
    fleet = Fleet(CPU)
    step = plan(SIZES, work, 2, 1, fleet, fleet, fleet, Links(), shares=shares(config, CORES))
    one_s = 2 * rollouts_s(SIZES, evaluation(config, work), 2, fleet)
    found = estimate(config, SIZES, CPU, "bfloat16", CORES, prompt=26, steps=7, useful=0.5)
    evaluations = 2 if step.step_s == step.working_s else 1
    assert found.seconds == pytest.approx(START_S + step.round_s + 6 * step.step_s + evaluations * one_s)
    assert found.step_s == step.step_s and found.bottleneck == step.bottleneck


def test_float32_is_planned_in_float32() -> None:
    """Half of the speed, and twice the bytes to read and to hold."""
    config, slow = settings(), this_cpu(200e9, 10e9, 24e9, CORES)
    fast = estimate(config, SIZES, CPU, "bfloat16", CORES, prompt=26, steps=12)
    full = estimate(config, SIZES, slow, "float32", CORES, prompt=26, steps=12)
    assert full.seconds > 1.2 * fast.seconds
    work = work_of(config, prompt=26, length=12, useful=1)
    assert full.memory_bytes - fast.memory_bytes == pytest.approx(
        sum(count * (memory_of(SIZES, work, 4).roles[role] - memory_of(SIZES, work, 2).roles[role])
            for role, count in {"learner": 1, "worker": config.workers.count, "validator": 1, "evaluator": 1}.items()),
    )  # fmt: skip


def test_an_evaluation_decodes_each_held_out_task_once() -> None:
    work = work_of(settings(), prompt=26, length=12)
    assert evaluation(settings(), work) == replace(work, generated=128, completions=1, at_once=64)


def test_completions_are_as_long_as_targets_say_or_as_the_limit() -> None:
    targets = {"sampling": {"max_tokens": 300}, "tasks": {"length_targets": [100, 200]}}
    assert expected_length(parse(targets)) == 150
    assert expected_length(parse({"sampling": {"max_tokens": 300}})) == 300
    assert expected_length(parse(targets | {"sampling": {"max_tokens": 120}})) == 120


@pytest.fixture
def prepared(tmp_path: Path) -> dict[str, Any]:
    """What `prepare` finds for SmolLM2 on such a machine."""
    sizes = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    machine = {"flops": 400e9, "bandwidth_Bps": 10e9, "memory_bytes": 24e9}
    return {"folder": str(tmp_path), "dtype": "bfloat16", "prompt_tokens": 26, "machine": machine}


def test_what_is_said_before_a_run_counts_only_the_steps_that_are_left(prepared: dict[str, Any]) -> None:
    config = settings(run={"steps": 12})
    whole = estimate(config, SIZES, CPU, "bfloat16", CORES, prompt=26, steps=12)
    assert of_prepared(config, prepared, CORES) == whole
    time, memory = whole.lines()
    assert time.startswith(f"time: about {duration(whole.seconds)} on this machine in bfloat16: 12 steps of ")
    assert memory == f"memory: about {figures.memory(round(whole.memory_bytes))} of 22.4 GiB"
    rest = of_prepared(config, prepared, CORES, trained=9)
    assert isinstance(rest, Estimate) and rest.steps == 3 and rest.seconds < whole.seconds


def test_what_the_arithmetic_does_not_cover_is_named(prepared: dict[str, Any], tmp_path: Path) -> None:
    adapters = settings(learner={"lora": {"rank": 4}})
    assert of_prepared(adapters, prepared, CORES) == "time and memory are not estimated for adapters"
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    found = of_prepared(settings(), prepared, CORES)
    assert isinstance(found, str) and found.startswith("time and memory are not estimated: ") and "lacks" in found
