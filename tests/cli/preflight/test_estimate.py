"""The forecast of a whole run's time and memory from given speeds, and what `shoal check CONFIG` prints."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import DONE, FAILED, main
from shoal.cli.preflight.estimate import (
    BUNDLED,
    START_S,
    USEFUL,
    Forecast,
    evaluation,
    expected_length,
    findings,
    forecast,
    memory_of,
    rollouts_s,
    share_threads,
    speed,
    step_seconds,
    work_of,
)
from shoal.config import Config, parse
from shoal.watch.figures import duration, memory

from ..support import sets

CORES = 2
SIZES = BUNDLED["bundled:smollm2-135m-instruct"]
MEASURED = {
    "dtype": "bfloat16",
    "prompt_tokens": 26,
    "machine": {"flops": 400e9, "bandwidth_Bps": 10e9, "memory_bytes": 24e9},
}


def settings(**sections: dict[str, Any]) -> Config:
    return parse(
        {
            "run": {"steps": 12},
            "model": {"name": "bundled:smollm2-135m-instruct"},
            "sampling": {"max_tokens": 12, "group_size": 8},
            "coordinator": {"prompts_per_step": 8, "async_level": 1},
            "learner": {"optimizer_steps_per_step": 1, "row_tokens": 1024, "loss": {"beta": 0.0}},
            "evaluator": {"n": 128},
        }
        | sections
    )


def whole(config: Config, trained: int = 0, **measured: Any) -> Forecast:
    run = forecast(config, MEASURED | measured, CORES, trained=trained)
    assert isinstance(run, Forecast)
    return run


def test_a_runs_time_is_the_sum_of_its_start_its_steps_and_two_evaluations() -> None:
    config, cpu = settings(), speed(400e9, 10e9, CORES)
    work = work_of(config, prompt=26, length=12, useful=USEFUL)
    assert evaluation(config, work) == replace(work, generated=128, completions=1, at_once=64)
    step_s = sum(step_seconds(SIZES, work, 2, cpu).values())
    run = whole(config)
    assert run.seconds == pytest.approx(START_S + 12 * step_s + 4 * rollouts_s(SIZES, evaluation(config, work), 2, cpu))
    assert (run.step_s, run.slowest, run.steps) == (step_s, "rollouts", 12)
    rest = whole(config, trained=9)
    assert rest.steps == 3 and rest.seconds < run.seconds


def test_float32_takes_more_time_and_memory_than_bfloat16() -> None:
    machine = {"flops": 200e9, "bandwidth_Bps": 10e9, "memory_bytes": 24e9}
    fast, full = whole(settings()), whole(settings(), dtype="float32", machine=machine)
    assert full.seconds > 1.2 * fast.seconds
    work = work_of(settings(), prompt=26, length=12, useful=1)
    counts = {"learner": 1, "worker": settings().workers.count, "validator": 1, "evaluator": 1}
    more = {role: memory_of(SIZES, work, 4)[role] - memory_of(SIZES, work, 2)[role] for role in counts}
    assert full.memory_bytes - fast.memory_bytes == pytest.approx(sum(more[role] * n for role, n in counts.items()))


def test_completions_are_as_long_as_the_mean_target_or_the_limit() -> None:
    targets = {"sampling": {"max_tokens": 300}, "tasks": {"length_targets": [100, 200]}}
    assert expected_length(parse(targets)) == 150
    assert expected_length(parse({"sampling": {"max_tokens": 300}})) == 300


def test_a_forecast_gives_two_findings_and_too_little_memory_fails() -> None:
    run = whole(settings())
    time, needed = findings(run, run.memory_bytes)
    assert time.text.startswith(f"about {duration(run.seconds)} in bfloat16: 12 steps of ")
    assert needed.level == "ok" and needed.text == f"about {memory(round(run.memory_bytes))} of 22.4 GiB"
    _, needed = findings(run, 3 << 30)
    assert needed.level == "warning" and needed.text.endswith(" of 22.4 GiB, 3.0 GiB free")
    _, needed = findings(replace(run, machine_bytes=1e9), 1e9)
    assert needed.level == "fails" and "learner.lora" in needed.remedy


def test_a_run_that_cannot_be_estimated_gives_the_reason_instead(tmp_path: Path) -> None:
    adapters = settings(learner={"lora": {"rank": 4}})
    assert forecast(adapters, MEASURED, CORES) == "not estimated for adapters"
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    reason = forecast(settings(model={"name": str(tmp_path)}), MEASURED, CORES)
    assert isinstance(reason, str) and reason.startswith("not estimated: ") and "lacks" in reason


def test_a_check_of_a_config_estimates_time_memory_and_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    assert main(["check", "tiny", "--dir", str(tmp_path / "runs")]) == DONE, "a missing folder must be no problem"
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    words = {name: text for _, name, text in lines}  # of two findings with one name, the run's comes last
    assert "24 steps of " in words["time"] and words["memory"].startswith("about ")
    assert "rewards and environments passed a trial" in words["tasks"]
    assert [name for _, name, _ in lines].count("disk") == 1 and "during the run" in words["disk"]
    assert not list(tmp_path.iterdir())


def test_a_check_names_all_problems_of_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["sampling.max_tokens=2000", 'tasks.sources=[{generator = "arithmetic", reward = "maths"}]']
    assert main(["check", "tiny", *sets(*wrong)]) == FAILED
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fails")]
    assert len(lines) == 2 and "lower sampling.max_tokens" in lines[0] and "no reward 'maths'" in lines[1]


def test_a_model_that_cannot_be_estimated_may_run(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_local_experts": 8}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["check", "tiny", "--set", f"model.name={tmp_path}"]) == DONE
    assert "mixture of experts" in capsys.readouterr().out


def test_roles_share_the_cores_unless_they_take_turns() -> None:
    settings = parse({"coordinator": {"async_level": 1}, "workers": {"count": 1}})
    for cores in (2, 4, 8, 16):
        threads = share_threads(settings, cores)
        assert threads["learner"] + threads["worker"] + threads["validator"] <= max(cores, 3), threads
    settings = parse({"coordinator": {"async_level": 0}, "workers": {"count": 2}, "validator": {"count": 1}})
    threads = share_threads(settings, 8)
    assert (threads["learner"], threads["validator"], threads["worker"]) == (8, 8, 4)


def test_a_check_of_a_config_for_fine_tuning_or_pretraining_looks_for_its_data_and_leaves_out_tasks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    for name in ("sft", "pretrain"):
        missing, there = (f"{name}.data='{tmp_path / file}'" for file in ("none.jsonl", "text.jsonl"))
        assert main(["check", name, "--set", missing]) == FAILED, name
        assert re.search("fails +config +no file", capsys.readouterr().out)
        assert main(["check", name, "--set", there]) == DONE, name
        printed = capsys.readouterr().out
        assert "its data is there" in printed and "to train on" not in printed and "disk" in printed
        assert main(["check", name, "--set", f"{name}.data=org/big:data/*.parquet"]) == DONE
        assert "on the Hugging Face hub and was not looked for" in capsys.readouterr().out
