"""`shoal check`: findings about made-up machines, and about this one."""

from pathlib import Path

import pytest

from shoal.cli.main import FAILED, main
from shoal.cli.preflight import machine
from shoal.cli.preflight.machine import GIB, CheckLine, examine, free_bytes


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (machine.of_device("cpu", ["H200", "H200"]), "warning", "2 x H200"),
        (machine.of_device("cpu", []), "ok", "no accelerator"),
        (machine.of_speed({"float32": 3.0, "bfloat16": 1.0}, 8), "warning", "float32 3"),
        (machine.of_speed({"float32": 170.0, "bfloat16": 800.0}, 1), "ok", "on 1 thread"),
        (machine.of_numerics({"float32": "rows differ", "bfloat16": "x"}), "warning", "rows differ"),
        (machine.of_numerics({"float32": "", "bfloat16": "x"}), "ok", "exact in float32"),
        (machine.of_memory(2 * GIB, GIB), "fails", "another machine"),
        (machine.of_memory(32 * GIB, GIB), "warning", "end other programs"),
        (machine.of_memory(32 * GIB, 30 * GIB), "ok", "32.0 GiB, 30.0 GiB free"),
        (machine.of_disk(Path(), GIB // 2), "fails", "free space"),
        (machine.of_disk(Path(), 5 * GIB), "warning", "small model"),
        (machine.of_disk(Path(__file__), 50 * GIB), "fails", "is not a folder"),
        (machine.of_sandbox({"bubblewrap": "no bwrap"}), "warning", "no bwrap"),
        (machine.of_sandbox({"bubblewrap": "", "kernel": "no userns"}), "ok", "bubblewrap"),
    ],
)
def test_every_problem_comes_with_a_remedy(finding: CheckLine, level: str, words: str) -> None:
    assert finding.level == level and words in finding.line()
    assert (level == "ok") != bool(finding.remedy)


def test_this_machine_is_measured_and_nothing_is_written(tmp_path: Path) -> None:
    names = [finding.name for finding in examine(tmp_path / "not" / "made")]
    assert [name for name in names if name != "system"] == [
        *("torch", "device", "speed", "numerics", "memory", "disk", "sandbox")
    ]
    assert free_bytes(tmp_path / "not" / "made") > 0 and not (tmp_path / "not").exists()


def test_a_missing_device_and_a_missing_folder_fail_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert {each.name for each in examine(tmp_path, "cuda:99") if each.level == "fails"} == {"device"}
    assert main(["check", "--dir", str(tmp_path / "file" / "below")]) == FAILED
    [wrong] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fails")]
    assert "file is not a folder" in wrong
