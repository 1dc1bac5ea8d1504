"""What a person at a shell meets: exit codes, one-line messages, and commands that start without loading torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import COMMANDS, DONE, FAILED, USAGE, main
from shoal.config import load

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.toml")


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text("[run]\nsteps = 3\n")
    return str(path)


def test_a_dry_run_prints_the_resolved_config(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "learner.loss.beta=0.5", "--set", "model.name=./here", "--seed", "9"]
    assert main(["run", small, "--dry-run", *overrides]) == DONE
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    config = load(printed)
    assert (config.run.steps, config.run.seed) == (3, 9)
    assert (config.learner.loss.beta, config.model.name) == (0.5, "./here")


def test_files_are_laid_over_a_config_in_order(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.toml").write_text(f"[validator]\nbatch = {number}\n")
    above = ["--with", str(tmp_path / "1.toml"), "--with", str(tmp_path / "2.toml")]
    assert main(["run", small, "--dry-run", *above]) == DONE
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    config = load(tmp_path / "printed.toml")
    assert (config.run.steps, config.validator.batch) == (3, 2)


def test_a_dry_run_starts_and_writes_nothing(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["run", small, "--dry-run"])
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["run", "{small}", "--set", "learner.lrr=1"], USAGE, "did you mean 'learner.lr'?"),
        (["run", "nowhere.toml"], USAGE, "no config at nowhere.toml"),
        (["run"], USAGE, "shoal run --resume DIR"),
        (["run", "{small}", "--with", "over.toml"], USAGE, "no config at over.toml"),
        (["verify", "nowhere.parquet", "--config", "{small}"], FAILED, "nowhere.parquet"),
        (["prepare", "{small}", "--set", "tasks.operand_max=3"], USAGE, "raise tasks.operand_max"),
        (["prepare", "{small}", "--set", "model.name=./nowhere"], FAILED, "no model at"),
        (["prepare", "{small}", "--set", "model.name=bundled:large"], FAILED, "there are 'bundled:smollm2"),
        (["invite", "{small}.d", "--role", "worker", "--name", "w"], FAILED, "is no coordinator's folder"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_status(
    small: str, arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("{small}", small) for argument in arguments]) == status
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"shoal {arguments[0]}: ") and words in told.err
    assert len(told.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [["swim"], [], ["worker", "--dir", "x"], ["invite", "x", "--role", "king", "--name", "k"]],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == USAGE
    assert "usage: shoal" in capsys.readouterr().err


def test_an_error_that_nobody_explained_keeps_its_traceback(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "prepare", lambda arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["prepare", small])


def test_from_a_shell_there_is_no_traceback() -> None:
    command = [sys.executable, "-m", "shoal", "run", QUICKSTART, "--set", "lerner.lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == USAGE
    assert len(done.stderr.splitlines()) == 1 and "did you mean 'learner'?" in done.stderr


HELP = "import contextlib, shoal.cli\nwith contextlib.suppress(SystemExit):\n    shoal.cli.main({!r})"


@pytest.mark.parametrize(
    "script",
    [
        HELP.format(["--help"]),
        HELP.format(["coordinator", "--help"]),
        "import shoal.cli, shoal.launch.swarm, shoal.tracking.report, shoal.view",
        "import shoal.roles.origin, shoal.roles.relay, shoal.protocol.node",
        "import shoal.coordinator.routes, shoal.coordinator.service",
    ],
    ids=["help", "coordinator-help", "swarm", "broadcast", "coordinator"],
)
def test_a_process_that_does_not_compute_never_imports_torch(script: str) -> None:
    script += "\nimport sys\nsys.exit('torch' in sys.modules and 'torch was imported')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
