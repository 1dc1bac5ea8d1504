"""`shoal eval`: its arguments, output and exit statuses, with a small lm_eval and without a served model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.main import DONE, USAGE
from shoal.evals.harness import Endpoint
from shoal.evals.suites import TABLE
from tests.evals.support import install_lm_eval


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two different models, `first` and `second`."""
    install_lm_eval(tmp_path / "installed", monkeypatch)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"name": name}))

    @contextmanager
    def serving(what: str, model: str, folder: Path, threads: int) -> Iterator[Endpoint]:
        yield Endpoint("http://127.0.0.1:1/v1", {"first": "right-2", "second": "right-9"}[model])

    monkeypatch.setattr("shoal.evals.harness.serving", serving)
    monkeypatch.setattr("sys.argv", ["/somewhere/shoal", "eval", "sums"])
    return tmp_path


def test_two_models_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", str(folder / "first"), "--model", str(folder / "second")]
    assert main(["eval", "sums", *models, "--out", str(folder / "out")]) == DONE
    shown = capsys.readouterr()
    assert "sums: 10 tasks, k = 1" in shown.out
    assert "second, sums: run 1 of 1" in shown.err
    written = json.loads((folder / "out" / "results.json").read_text())
    assert [result["model"] for result in written["results"]] == ["first", "second"]
    assert written["command"] == "shoal eval sums"


def test_a_model_behind_a_url_is_measured_with_other_sampling(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--url", "http://127.0.0.1:1/v1", "--served-name", "right-4"]
    sampling = ["--k", "2", "--temperature", "0.6", "--n", "5"]
    assert main(["eval", "sums", *server, *sampling, "--out", str(folder / "out")]) == DONE
    assert "sums: 5 tasks, k = 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a suite"),
        (["GSM8K"], "name a model"),
        (["GSM8K", "--url", "http://h/v1"], "--served-name go together"),
        (["GSM8K", "--served-name", "x"], "--served-name go together"),
    ],
)
def test_incomplete_arguments_say_what_is_missing(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suites", ["sums", "HumanEval,MBPP"])
def test_the_path_argument_needs_one_code_suite(suites: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--url", "http://127.0.0.1:1/v1", "--served-name", "right-3"]
    assert main(["eval", suites, *server, "--path", "rows.jsonl", "--out", str(folder / "out")]) == USAGE
    assert "--path needs exactly one suite" in capsys.readouterr().err


def test_two_models_with_the_same_name_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = ["--model", str(folder / "first")]
    assert main(["eval", "sums", *first, *first, "--out", str(folder / "out")]) == USAGE
    assert "two models are called" in capsys.readouterr().err


def test_the_help_explains_which_tasks_n_selects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "for lm_eval the first N, for a code suite N chosen by hash" in words


def test_the_list_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--list"]) == DONE
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == [suite.name for suite in TABLE]
