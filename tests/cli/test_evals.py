"""`shoal eval`: arguments, what it writes, and its exit status. The model is a fake; tasks are a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.main import DONE, USAGE
from shoal.evals.evaluate import Contestant
from shoal.evals.suites import TABLE
from tests.evals.support import FakeSampler


class GsmSampler(FakeSampler):
    def _answer(self, asked: Any) -> Any:
        found = super()._answer(type(asked)(asked.suite, asked.task, asked.sample, f"x {_last(asked.message)}"))
        return type(found)(
            found.text.replace("I say ", "So \\boxed{").replace("no idea", "") + "}", found.tokens, found.ended
        )


def _last(message: str) -> str:
    return next(word for word in message.split() if word.isdigit())


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gsm.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"after {n} ?", "answer": f"#### {n + 1}"}) + "\n" for n in range(12))
    )
    monkeypatch.setattr("shoal.evals.local.folder_of", lambda name: tmp_path)
    monkeypatch.setattr(
        "shoal.evals.local.local",
        lambda label, folder, dtype, device, batch: Contestant(
            label, {"dtype": dtype}, lambda: GsmSampler(0.9 if label == "strong" else 0.3)
        ),
    )
    monkeypatch.setattr("shoal.model.dtype.pick", lambda wanted, device: ("float32", {}))
    return path


def evaluate(rows: Path, *more: str) -> int:
    return main(["eval", "GSM8K", "--path", str(rows), "--out", str(rows.parent / "out"), *more])


def test_two_models_side_by_side(
    rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/shoal", "eval", "GSM8K"])
    models = ["--model", "weak", "--model", "strong", "--k", "4", "--temperature", "1", "--n", "10"]
    assert evaluate(rows, *models) == DONE
    shown = capsys.readouterr()
    assert "GSM8K: 10 tasks, k = 4" in shown.out
    assert "strong less weak: +" in shown.out
    assert "completions: 40 of 40" in shown.err
    out = rows.parent / "out"
    found = json.loads((out / "results.json").read_text())
    assert [result["model"] for result in found["results"]] == ["weak", "strong"]
    assert found["results"][0]["avg"]["mean"] < found["results"][1]["avg"]["mean"]
    assert found["config"]["suites"]["GSM8K"]["tasks"] == 10
    assert found["command"] == "shoal eval GSM8K"
    assert (out / "results.png").stat().st_size > 1000
    assert len((out / "completions.jsonl").read_text().splitlines()) == 80


def test_repeating_the_command_gives_the_same_and_asks_nothing(
    rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluate(rows, "--model", "weak") == DONE
    first = capsys.readouterr().out

    def refuse(*_: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(GsmSampler, "answer", refuse)
    assert evaluate(rows, "--model", "weak") == DONE
    assert capsys.readouterr().out == first


def test_other_settings_in_the_same_folder_fail_with_the_difference(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(rows, "--model", "weak")
    assert evaluate(rows, "--model", "weak", "--max-tokens", "100") == USAGE
    assert "max_tokens of GSM8K = 2048, and this is 100" in capsys.readouterr().err


def test_the_dtype_of_a_folder_stays_though_another_would_be_picked_now(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(wanted: str, device: str) -> tuple[str, dict[str, float]]:
        return ("bfloat16" if wanted == "auto" else wanted), {}

    assert evaluate(rows, "--model", "weak") == DONE  # float32
    monkeypatch.setattr("shoal.model.dtype.pick", pick)
    assert evaluate(rows, "--model", "weak") == DONE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a suite"),
        (["GSM8K"], "name a model"),
        (["GSM8K", "--url", "http://h/v1"], "--served-name go together"),
        (["GSM8K", "--served-name", "x"], "--served-name go together"),
        (["GSM8K,MBPP", "--model", "m", "--path", "p"], "one suite at a time"),
    ],
)
def test_incomplete_arguments_say_what_is_missing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == USAGE
    assert said in capsys.readouterr().err


def test_an_unknown_suite_and_a_missing_file_fail_with_one_line(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "MMLU", "--model", "m"]) == USAGE
    assert main(["eval", "GSM8K", "--model", "m", "--path", str(rows.parent / "none.jsonl")]) == USAGE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "no suite 'mmlu'; there are AIME24" in lines[0]
    assert "no file or folder at" in lines[1]


def test_two_models_of_one_name_are_refused(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(rows, "--model", "weak", "--model", "weak") == USAGE
    assert "two models are called weak" in capsys.readouterr().err


def test_the_list_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--list"]) == DONE
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == [suite.name for suite in TABLE]
