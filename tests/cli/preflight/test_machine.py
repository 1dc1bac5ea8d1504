"""Each fact that stops or slows a run, one at a time, against a machine that is fit; and what is measured here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli.main import FAILED, main
from shoal.cli.preflight.machine import Facts, Finding, examine, gather, ok, warning

GIB = 1 << 30
FIT = Facts(
    python=(3, 12, 3),
    torch="2.13.0+cpu",
    gflops={"float32": 170.0, "bfloat16": 800.0},
    inexact={"float32": "", "bfloat16": "no"},
    threads=8,
    memory_bytes=32 * GIB,
    free_memory_bytes=30 * GIB,
    folder="here",
    free_disk_bytes=100 * GIB,
    open_files=(1024, 65536),
    sandbox={"bubblewrap": "", "kernel": "no userns", "rlimits": ""},
)


def found(name: str, **changed: object) -> Finding:
    return next(one for one in examine(replace(FIT, **changed)) if one.name == name)  # type: ignore[arg-type]


def test_nothing_is_wrong_with_a_fit_machine() -> None:
    assert {one.verdict for one in examine(FIT)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "verdict", "changed", "said"),
    [
        ("python", "fails", {"python": (3, 10, 1)}, "install Python 3.11"),
        ("python", "warning", {"python": (3, 15, 0)}, "nobody has tried"),
        ("system", "warning", {"system": "Darwin"}, "Darwin"),
        ("system", "warning", {"architecture": "aarch64"}, "aarch64"),
        ("torch", "fails", {"torch": "", "torch_error": "no libgomp"}, "no libgomp"),
        ("torch", "fails", {"torch": "2.5.1"}, "2.6 or newer"),
        ("device", "fails", {"device": "cuda", "device_error": "no driver"}, "nvidia-smi"),
        ("device", "warning", {"accelerators": ["H200", "H200"]}, "2 of H200"),
        ("speed", "warning", {"gflops": {"float32": 3.0, "bfloat16": 1.0}}, "float32 3"),
        ("numerics", "warning", {"inexact": {"float32": "rows differ", "bfloat16": "x"}}, "rows differ"),
        ("memory", "fails", {"memory_bytes": 2 * GIB}, "another machine"),
        ("memory", "warning", {"free_memory_bytes": GIB}, "end other programs"),
        ("disk", "fails", {"free_disk_bytes": GIB // 2}, "free space"),
        ("disk", "warning", {"free_disk_bytes": 5 * GIB}, "small model"),
        ("disk", "fails", {"folder_error": "/x cannot be written by this user"}, "/x"),
        ("files", "fails", {"open_files": (100, 100)}, "LimitNOFILE"),
        ("files", "warning", {"open_files": (1024, 1024)}, "ulimit -Hn"),
        ("sandbox", "warning", {"sandbox": {"bubblewrap": "no bwrap", "rlimits": ""}}, "no bwrap"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(name: str, verdict: str, changed: dict[str, object], said: str) -> None:
    one = found(name, **changed)
    assert one.verdict == verdict
    assert said in one.line() and one.remedy


def test_a_machine_without_torch_is_told_so_once() -> None:
    names = [one.name for one in examine(replace(FIT, torch="", torch_error="none", gflops={}, inexact={}))]
    assert "torch" in names and not {"device", "speed", "numerics"} & set(names)


def test_a_finding_has_a_remedy_exactly_if_something_is_wrong() -> None:
    with pytest.raises(ValueError, match="a remedy belongs"):
        warning("disk", "full", "")
    assert ok("disk", "5 GiB").remedy == ""


def test_a_line_goes_on_below_where_the_terminal_ends() -> None:
    long = warning("numerics", "fast only: " + "why " * 30, "calibrate")
    first, *below = long.line(80).splitlines()
    assert first.startswith("warning  numerics") and below and all(one.startswith(" " * 19) for one in below)
    assert max(map(len, [first, *below])) <= 80
    assert " ".join(long.line(80).split()) == " ".join(long.line().split())


def test_one_thread_is_not_threads() -> None:
    assert found("speed", threads=1).found.endswith("on 1 thread")


def test_this_machine_is_measured(tmp_path: Path) -> None:
    facts = gather(tmp_path / "not" / "made")
    assert facts.torch and not facts.torch_error and not facts.device_error
    assert set(facts.gflops) == set(facts.inexact) == {"float32", "bfloat16"}
    assert set(facts.sandbox) == {"bubblewrap", "kernel", "rlimits"}
    assert facts.memory_bytes >= facts.free_memory_bytes > 0 and facts.free_disk_bytes > 0
    assert not (tmp_path / "not").exists()


def test_an_unknown_device_is_a_fact_and_no_exception(tmp_path: Path) -> None:
    facts = gather(tmp_path, device="cuda:99")
    assert "cuda:99" in facts.device_error
    assert facts.gflops == {}


def test_a_folder_that_is_none_fails_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["check", "--dir", str(tmp_path / "file" / "below"), "--json"]) == FAILED
    report = json.loads(capsys.readouterr().out)
    [wrong] = [one for one in report["findings"] if one["verdict"] == "fails"]
    assert wrong["name"] == "disk" and "file is not a folder" in wrong["found"]
