"""A whole run's time and memory, composed of given rates: no clock is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import DONE, FAILED, main
from shoal.cli.preflight import disk
from shoal.cli.preflight.estimate import (
    START_S,
    Estimate,
    estimate,
    evaluation,
    expected_length,
    of_measured,
    outlook,
    share_threads,
    shares,
)
from shoal.cli.preflight.memory import memory_of
from shoal.cli.preflight.speed import pace, rollouts_s, speed
from shoal.cli.preflight.work import BUNDLED, work_of
from shoal.config import Config, parse
from shoal.watch import figures
from shoal.watch.figures import duration

CORES = 2
CPU = speed(400e9, 10e9, 24e9, CORES)
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
    step = pace(SIZES, work, 2, 1, CPU, shares(config, CORES))
    one_s = 2 * rollouts_s(SIZES, evaluation(config, work), 2, CPU)
    found = estimate(config, SIZES, CPU, "bfloat16", CORES, prompt=26, steps=7, useful=0.5)
    evaluations = 2 if step.step_s == step.working_s else 1
    assert found.seconds == pytest.approx(START_S + step.round_s + 6 * step.step_s + evaluations * one_s)
    assert found.step_s == step.step_s and found.bottleneck == step.bottleneck


def test_float32_is_planned_in_float32() -> None:
    """Half of the speed, and twice the bytes to read and to hold."""
    config, slow = settings(), speed(200e9, 10e9, 24e9, CORES)
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


MEASURED = {
    "dtype": "bfloat16",
    "prompt_tokens": 26,
    "machine": {"flops": 400e9, "bandwidth_Bps": 10e9, "memory_bytes": 24e9},
}


def test_what_is_said_before_a_run_counts_only_the_steps_that_are_left() -> None:
    config = settings(run={"steps": 12})
    whole = estimate(config, SIZES, CPU, "bfloat16", CORES, prompt=26, steps=12)
    assert of_measured(config, MEASURED, CORES) == whole
    assert whole.time().startswith(f"about {duration(whole.seconds)} in bfloat16: 12 steps of ")
    assert len(f"time: {whole.time()}") <= 80
    assert whole.memory() == f"about {figures.memory(round(whole.memory_bytes))} of 22.4 GiB"
    rest = of_measured(config, MEASURED, CORES, trained=9)
    assert isinstance(rest, Estimate) and rest.steps == 3 and rest.seconds < whole.seconds


def test_what_the_arithmetic_does_not_cover_is_named(tmp_path: Path) -> None:
    adapters = settings(learner={"lora": {"rank": 4}})
    assert of_measured(adapters, MEASURED, CORES) == "not estimated for adapters"
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    found = of_measured(settings(model={"name": str(tmp_path)}), MEASURED, CORES)
    assert isinstance(found, str) and found.startswith("not estimated: ") and "lacks" in found


def test_memory_and_disk_that_do_not_suffice_fail_with_what_to_do() -> None:
    enough, more = disk.Needs(peak_bytes=10**9, kept_bytes=10**6), disk.Needs(peak_bytes=10**13, kept_bytes=10**6)
    small = MEASURED | {"machine": {"flops": 400e9, "bandwidth_Bps": 10e9, "memory_bytes": 1e9}}
    for measured, needs, verdicts in ((MEASURED, enough, ["ok"] * 3), (small, more, ["ok", "fails", "fails"])):
        _, findings = outlook(settings(), measured, CORES, needs, free_bytes=10**12)
        assert [one.name for one in findings] == ["time", "memory", "disk"]
        assert [one.verdict for one in findings] == verdicts
    assert "learner.lora" in findings[1].remedy and "relays.keep" in findings[2].remedy


def test_a_check_of_a_config_says_time_memory_and_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    assert main(["check", "tiny", "--dir", str(tmp_path), "--json"]) == DONE
    findings = json.loads(capsys.readouterr().out)["findings"]
    said = {one["name"]: one["found"] for one in findings}  # the last of each name: of the run
    assert "24 steps of " in said["time"] and said["memory"].startswith("about ")
    assert "during the run" in said["disk"] and not list(tmp_path.iterdir())


def test_a_check_names_what_stops_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tiny", "--set", "sampling.max_tokens=2000", "--set", "run.threads=4000"]) == FAILED
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fails")]
    assert len(lines) == 2 and "lower sampling.max_tokens" in lines[0] and "run.threads = 4000" in lines[1]


def test_roles_that_work_at_once_share_the_cores() -> None:
    settings = parse({"coordinator": {"async_level": 1}, "workers": {"count": 1}})
    for cores in (2, 4, 8, 16):
        threads = share_threads(settings, cores)
        assert threads["learner"] + threads["worker"] + threads["validator"] <= max(cores, 3), threads


def test_roles_that_take_turns_have_all_cores_each() -> None:
    settings = parse({"coordinator": {"async_level": 0}, "workers": {"count": 2}, "validator": {"count": 1}})
    threads = share_threads(settings, 8)
    assert (threads["learner"], threads["validator"], threads["worker"]) == (8, 8, 4)
