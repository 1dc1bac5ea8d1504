"""What is measured here, as far as it can be known without knowing this machine."""

import json
import socket
from pathlib import Path

import pytest

from shoal.cli.main import FAILED, USAGE, main
from shoal.doctor.facts import EXTRAS, gather


def test_a_port_in_use_and_a_folder_that_is_none_fail_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))  # noqa: S104
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["doctor", "relay", "--port", port, "--dir", str(tmp_path), "--json"]) == FAILED
    report = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in report["findings"] if one["verdict"] == "fails"] == ["port"]
    assert report["facts"]["ports"][port]

    (tmp_path / "file").touch()
    assert main(["doctor", "relay", "--port", "0", "--dir", str(tmp_path / "file" / "below")]) == FAILED
    assert "file is not a folder" in capsys.readouterr().out


def test_a_relay_is_looked_at_without_torch(tmp_path: Path) -> None:
    facts = gather("relay", tmp_path / "not" / "made", ports=[0])
    assert facts.torch == "" and facts.sandbox == {} and facts.gflops == {}
    assert facts.memory_bytes >= facts.free_memory_bytes > 0 and facts.free_disk_bytes > 0 and facts.cores > 0
    assert not (tmp_path / "not").exists()
    assert facts.ports == {0: ""}


def test_a_computing_role_is_measured(tmp_path: Path) -> None:
    facts = gather("worker", tmp_path)
    assert facts.torch and not facts.torch_error and not facts.device_error
    assert set(facts.gflops) == set(facts.inexact) == {"float32", "bfloat16"}
    assert set(facts.sandbox) == {"bubblewrap", "kernel", "rlimits"}


def test_an_unknown_device_is_a_fact_and_no_exception(tmp_path: Path) -> None:
    facts = gather("worker", tmp_path, device="cuda:99")
    assert "cuda:99" in facts.device_error
    assert facts.gflops == {}


def test_every_extra_of_the_project_is_looked_for() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == {name for name in project["optional-dependencies"] if "dev" not in name}


def test_wrong_usage_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--join", "shoal1.nonsense"]) == USAGE
    assert "damaged" in capsys.readouterr().err
