"""The memory that a whole run needs, what `shoal check CONFIG` prints, and how roles share the cores."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import DONE, FAILED, main
from shoal.cli.preflight.estimate import (
    BUNDLED,
    memory_finding,
    memory_of,
    needed_bytes,
    processes,
    share_threads,
    together,
    work_of,
)
from shoal.config import Config, parse

from ..support import sets

SIZES = BUNDLED["bundled:smollm2-135m-instruct"]


def settings(**sections: dict[str, Any]) -> Config:
    return parse({"model": {"name": "bundled:smollm2-135m-instruct"}} | sections)


@pytest.mark.parametrize(("dtype", "compute_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_a_runs_memory_is_that_of_all_its_processes(dtype: str, compute_bytes: int) -> None:
    config = settings()
    roles = memory_of(SIZES, work_of(config, 26), compute_bytes)
    assert needed_bytes(config, dtype, 26) == together(roles, processes(config))


def test_too_little_memory_fails_and_too_little_free_memory_warns() -> None:
    needed = memory_finding(2.0 * 2**30, 8 << 30, 3 << 30)
    assert (needed.level, needed.text) == ("ok", "about 2.0 GiB of 8.0 GiB")
    needed = memory_finding(4.0 * 2**30, 8 << 30, 3 << 30)
    assert (needed.level, needed.text) == ("warning", "about 4.0 GiB of 8.0 GiB, 3.0 GiB free")
    needed = memory_finding(9.0 * 2**30, 8 << 30, 3 << 30)
    assert needed.level == "fails" and "learner.lora" in needed.remedy


def test_a_run_that_cannot_be_estimated_gives_the_reason_instead(tmp_path: Path) -> None:
    reason = needed_bytes(settings(learner={"lora": {"rank": 4}}), "bfloat16", 26)
    assert reason == "not estimated for adapters"
    assert memory_finding(reason, 1, 1).text == reason
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    reason = needed_bytes(settings(model={"name": str(tmp_path)}), "bfloat16", 26)
    assert isinstance(reason, str) and reason.startswith("not estimated: ") and "lacks" in reason


def test_a_check_of_a_config_estimates_memory_and_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    assert main(["check", "tiny", "--dir", str(tmp_path / "runs")]) == DONE, "a missing folder must be no problem"
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    words = {name: text for _, name, text in lines}  # of two findings with one name, the run's comes last
    assert "time" not in words and words["memory"].startswith("about ")
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
