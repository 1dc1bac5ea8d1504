"""A filter that is killed and repeated writes the same files, and its manifest lists the tasks within the band."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from shoal import tasks
from shoal.cli.main import USAGE, main
from shoal.config import Config, dumps, parse
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError
from shoal.evals import filter as filter_module
from shoal.evals.filter import (
    FORMAT,
    MANIFEST,
    RESULTS,
    Band,
    PassRate,
    PassRates,
    histogram,
    write_filter,
)
from shoal.protocol.messages import MILLION

from ..rewards import Always

BAND = Band.parse("0.25:0.5")
FILES = (MANIFEST, RESULTS, "settings.json")


@pytest.fixture(autouse=True)
def _two_tasks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "ROWS", 8)


def settings(folder: Path, **sections: Any) -> Config:
    """Return a config whose tasks are sums, for a tokenizer of characters. Completions have at most six tokens."""
    base: dict[str, Any] = {
        "model": {"name": str(folder), "dtype": "float32"},
        "tasks": {"heldout": 16, "prompt": "{question}="},
        "sampling": {"max_tokens": 6},
        "evaluator": {"n": 16},
    }
    return parse({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


class Scripted:
    """An engine without a model: completion c of task t is correct if c < `right[t]`."""

    def __init__(self, folder: Path, right: Sequence[int], answers: Sequence[str]) -> None:
        from shoal.model.load import load_tokenizer

        self.tokenizer = load_tokenizer(folder)
        self.right, self.answers, self.at, self.calls = right, answers, 0, 0

    def load(self, folder: Path) -> None:
        pass

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling, reply: Any = None
    ) -> list[list[Completion]]:
        self.calls += 1
        groups = [[self.complete(self.at + n, c) for c in range(len(group))] for n, group in enumerate(seeds)]
        self.at += len(prompts)
        return groups

    def complete(self, task: int, completion: int) -> Completion:
        text = self.answers[task] if completion < self.right[task] else "no"
        return Completion(self.tokenizer(text, add_special_tokens=False)["input_ids"], [], None)  # type: ignore[arg-type]


RIGHT = [0, 1, 2, 3, 4, 2, 0, 1]


def rates(folder: Path, out: Path, n: int = len(RIGHT), **sections: Any) -> PassRates:
    """Return a measurement with four completions per task that decodes two tasks together."""
    return PassRates(settings(folder, **sections), folder, out, 4, n)


def scripted(folder: Path, measured: PassRates, at: int = 0) -> Scripted:
    engine = Scripted(folder, RIGHT, [task.answer for task in measured.tasks.train[: len(RIGHT)]])
    engine.at = at
    return engine


def measure(measured: PassRates, engine: Any) -> list[PassRate]:
    results = measured.measure(engine, threading.Event(), lambda done: None)
    assert results is not None
    return results


def test_each_task_has_its_pass_rate_and_outcomes(tiny_folder: Path, tmp_path: Path) -> None:
    measured = rates(tiny_folder, tmp_path)
    results = measure(measured, scripted(tiny_folder, measured))
    assert [result.task for result in results] == [task.id for task in measured.tasks.train[:8]]
    assert [result.score for result in results] == [right * MILLION for right in RIGHT]
    assert [(result.graded, result.wrong_format) for result in results] == [(right, 4 - right) for right in RIGHT]
    assert all(result.n == 4 and result.source == "arithmetic" and result.tokens > 0 for result in results)


def test_the_manifest_lists_the_tasks_within_the_band_including_its_bounds(tiny_folder: Path, tmp_path: Path) -> None:
    measured = rates(tiny_folder, tmp_path)
    results = measure(measured, scripted(tiny_folder, measured))
    write_filter(tmp_path, results, BAND, measured.settings)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    expected = {
        "format": FORMAT,
        "digest": tasks.load(measured.config.tasks).digest,
        "model": str(tiny_folder),
        "k": 4,
        "temperature": 1.0,
        "max_tokens": 6,
        "band": [0.25, 0.5],
        "kept": [results[n].task for n in (1, 2, 5, 7)],
        "counts": {
            "tasks": 8,
            "kept": 4,
            "below": 2,
            "above": 2,
            "grader_error": 0,
            "sources": {"arithmetic": {"tasks": 8, "kept": 4}},
        },
    }
    assert {name: manifest[name] for name in expected} == expected


def test_another_band_needs_no_new_completions(tiny_folder: Path, tmp_path: Path) -> None:
    measured = rates(tiny_folder, tmp_path)
    measure(measured, scripted(tiny_folder, measured))
    again = rates(tiny_folder, tmp_path)
    results = measure(again, None)
    assert [result.score for result in results] == [right * MILLION for right in RIGHT]
    assert len(write_filter(tmp_path, results, Band.parse("1:1"), again.settings)) == 1


def test_another_number_of_tasks_reuses_the_results(tiny_folder: Path, tmp_path: Path) -> None:
    few = rates(tiny_folder, tmp_path, 4)
    measure(few, scripted(tiny_folder, few))
    many = rates(tiny_folder, tmp_path)
    engine = scripted(tiny_folder, many, at=4)
    assert [result.score // MILLION for result in measure(many, engine)] == RIGHT
    assert engine.calls == 2, "the four new tasks must take two calls, of two tasks each"
    assert [result.score // MILLION for result in measure(rates(tiny_folder, tmp_path, 3), None)] == RIGHT[:3]
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 8, "results of a larger measurement were discarded"


KILL = """
import os, signal, sys
from shoal.cli.main import main
from shoal.engine.torch_engine import TorchEngine
from shoal.evals import filter as filter_module

filter_module.ROWS = 8
where, calls = sys.argv[1], []
def killed_in_third_call(function):
    def replaced(*arguments):
        calls.append(1)
        if len(calls) == 3:
            if where == "append":  # half of the batch's first line is written
                arguments[0].write(b'{"task": "arith')
                arguments[0].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return replaced
if where == "generate":
    TorchEngine.generate = killed_in_third_call(TorchEngine.generate)
elif where == "append":
    filter_module.append = killed_in_third_call(filter_module.append)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("where", [pytest.param("generate", marks=pytest.mark.slow), "append"])
def test_a_filter_that_was_killed_and_repeated_writes_the_same_files(
    one_thread: None, tiny_folder: Path, tmp_path: Path, where: str
) -> None:
    config = tmp_path / "sums.toml"
    config.write_text(dumps(settings(tiny_folder)))
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = ["filter", str(config), "--out", str(killed), "--k", "4", "--band", "0:1", "--n", "9", "--threads", "1"]
    ended = subprocess.run([sys.executable, "-c", KILL, where, *command], capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    assert (killed / RESULTS).read_bytes().count(b"\n") == 4 and not (killed / MANIFEST).exists()
    if where == "generate":
        done = subprocess.run([sys.executable, "-c", KILL, "", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "kept 9 of 9 tasks" in done.stdout and str(killed / MANIFEST) in done.stdout
        assert "tasks: 4 of 9" in done.stderr and "tasks: 9 of 9" in done.stderr, "the progress was not printed"
    for out in (whole,) if where == "generate" else (whole, killed):
        measured = rates(tiny_folder, out, 9)
        write_filter(out, measure(measured, TorchEngine("float32")), Band.parse("0:1"), measured.settings)
    assert sorted(path.name for path in killed.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_partly_written_batch_is_repeated(tiny_folder: Path, tmp_path: Path) -> None:
    measured = rates(tiny_folder, tmp_path)
    measure(measured, scripted(tiny_folder, measured))
    whole = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + b'{"task": "arith')
    engine = scripted(tiny_folder, measured, at=2)
    assert [result.score // MILLION for result in measure(measured, engine)] == RIGHT
    assert engine.calls == 3 and (tmp_path / RESULTS).read_bytes() == whole


def test_a_stop_keeps_the_finished_batches(tiny_folder: Path, tmp_path: Path) -> None:
    measured, stop = rates(tiny_folder, tmp_path), threading.Event()
    seen: list[int] = []

    def say(done: int) -> None:
        seen.append(done)
        if done == 4:
            stop.set()

    assert measured.measure(scripted(tiny_folder, measured), stop, say) is None and seen == [0, 2, 4]
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tasks": {"sources": [{"generator": "arithmetic", "options": {"operand_max": 20}}]}}, "the tasks"),
        ({"sampling": {"temperature": 0.5, "max_tokens": 6}}, "temperature was 1.0 and is now 0.5"),
        ({"tasks": {"prompt": "{question} is"}}, "prompts_and_rewards"),
        ({"run": {"seed": 4}}, "seed was 0 and is now 4"),
    ],
)
def test_changed_settings_are_refused(tiny_folder: Path, tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    first = rates(tiny_folder, tmp_path, 2)
    measure(first, scripted(tiny_folder, first))
    with pytest.raises(ShoalError, match=f"{named}.*choose another --out"):
        measure(rates(tiny_folder, tmp_path, **changed), None)


def test_the_error_for_a_band_without_tasks_states_the_distribution_of_pass_rates(
    tiny_folder: Path, tmp_path: Path
) -> None:
    measured = rates(tiny_folder, tmp_path)
    results = measure(measured, scripted(tiny_folder, measured))
    write_filter(tmp_path, results, BAND, measured.settings)
    message = (
        r"no task of 8 has a pass rate from 0\.3 to 0\.4; tasks by pass rate: 0/4: 2, 1/4: 2, 2/4: 2, 3/4: 1, 4/4: 1; "
        r"choose another --band"
    )
    with pytest.raises(ShoalError, match=message):
        write_filter(tmp_path, results, Band.parse("0.3:0.4"), measured.settings)
    assert not (tmp_path / MANIFEST).exists(), "the manifest of another band was left, where a config could use it"


@pytest.mark.parametrize("text", ["0.5", "0.5:0.1", "-0.1:0.5", "0:1.5", "a:b", "0:0.5:1", "1/0:1", "nan:1", ":"])
def test_an_invalid_band_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a band of pass rates"):
        Band.parse(text)


def test_the_bounds_of_a_band_are_exact() -> None:
    assert Band.parse("1/8:0.5") == Band(Fraction(1, 8), Fraction(1, 2))
    result = PassRate("t", "s", n=10, score=MILLION, tokens=1, graded=10, wrong_format=0, grader_error=0)
    assert Band.parse("0.1:0.1").contains(result), "a pass rate of 1 in 10 must equal the bound 0.1"


def test_a_failing_grader_stops_the_filter_with_its_message(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.Graders, "_reward", lambda *_: Always(0.0, "grader_error", "no module named sympy"))
    measured = rates(tiny_folder, tmp_path, 40)
    engine = Scripted(tiny_folder, [0] * 40, ["1"] * 40)
    with pytest.raises(ShoalError, match=r"failed for 64 of 64 completions.*10%.*no module named sympy"):
        measure(measured, engine)


def test_a_task_with_a_grader_error_is_never_kept(tiny_folder: Path, tmp_path: Path) -> None:
    graded = PassRate("a", "s", n=4, score=2 * MILLION, tokens=4, graded=4, wrong_format=0, grader_error=0)
    failed = PassRate("b", "s", n=4, score=2 * MILLION, tokens=4, graded=3, wrong_format=0, grader_error=1)
    assert [result.task for result in write_filter(tmp_path, [graded, failed], BAND, {})] == ["a"]
    assert json.loads((tmp_path / MANIFEST).read_text())["counts"]["grader_error"] == 1


def test_after_a_full_disk_the_command_can_be_repeated(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, append = rates(tiny_folder, tmp_path), filter_module.append

    def full(file: Any, results: Any) -> None:
        file.write(b'{"task": "half')
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(filter_module, "append", full)
    with pytest.raises(ShoalError, match=f"the disk of {tmp_path} is full: free space there, then repeat"):
        measure(measured, scripted(tiny_folder, measured))
    monkeypatch.setattr(filter_module, "append", append)
    assert [result.score // MILLION for result in measure(measured, scripted(tiny_folder, measured))] == RIGHT


def test_a_folder_is_locked_against_a_second_filter(tiny_folder: Path, tmp_path: Path) -> None:
    measured = rates(tiny_folder, tmp_path)
    with measured._lock_results(), pytest.raises(ShoalError, match="another process writes"):
        measure(rates(tiny_folder, tmp_path), None)


def test_a_filter_ignores_the_manifest_in_its_config(tiny_folder: Path, tmp_path: Path) -> None:
    filtered = {"sources": [{"generator": "arithmetic", "keep": "nowhere/manifest.json"}], "digest": "0" * 64}
    digests = [rates(tiny_folder, tmp_path, tasks=section).settings["digest"] for section in (filtered, {})]
    assert digests[0] == digests[1]


class CallsCalculator(Scripted):
    """Calls the calculator, and then answers 42."""

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling, reply: Any = None
    ) -> list[list[Completion]]:
        return [[self.call(group, number, reply) for number in range(len(seeds[group]))] for group in range(len(seeds))]

    def call(self, group: int, number: int, reply: Any) -> Completion:
        end = self.tokenizer.eos_token_id
        call = [*self.tokenizer("calc(6*7)", add_special_tokens=False)["input_ids"], end]
        response = reply(group, number, call, [])
        answer = [*self.tokenizer("42", add_special_tokens=False)["input_ids"], end]
        return Completion([*call, *response, *answer], [], None, [len(call), len(response)])  # type: ignore[arg-type]


def test_an_environment_answers_and_the_last_turn_is_graded(tiny_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "products.jsonl"
    data.write_text("".join(json.dumps({"question": f"6*7 ({n})", "answer": "42"}) + "\n" for n in range(40)))
    measured = rates(
        tiny_folder,
        tmp_path / "out",
        4,
        tasks={"sources": [{"path": str(data), "environment": "calculator"}], "heldout": 16},
        sampling={"max_tokens": 40, "max_turns": 2},
    )
    results = measure(measured, CallsCalculator(tiny_folder, [], []))
    assert [result.score for result in results] == [4 * MILLION] * 4
    assert {result.tokens for result in results} == {4 * (10 + 3)}, "only the model's own tokens must be counted"


def test_a_histogram_of_many_completions_has_ten_bins() -> None:
    results = [
        PassRate("t", "s", n=20, score=right * MILLION, tokens=1, graded=20, wrong_format=0, grader_error=0)
        for right in (0, 1, 2, 20)
    ]
    bins = histogram(results)
    assert list(bins.values()) == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1] and next(iter(bins)) == "0.0 to 0.1"


def test_an_invalid_band_on_the_command_line_is_a_usage_error(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "sums.toml"
    config.write_text(dumps(settings(tiny_folder)))
    assert main(["filter", str(config), "--out", str(tmp_path / "out"), "--band", "0.5:0.1"]) == USAGE
    assert "--band: '0.5:0.1' is not a band of pass rates: 0 <= LOW" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
