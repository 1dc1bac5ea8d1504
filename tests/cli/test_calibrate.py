"""Calibration with a tiny random model: it measures honest work, and a config can load the limits that it writes."""

import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.trust.adversary.cheats import QuantizedWeights

from shoal import config as config_module
from shoal.cli.calibrate import AVERAGES, LIMITS, RUN, bounds, by_pair, calibrate, honest_figures, write_limits
from shoal.cli.main import FAILED, main
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError, UserError
from shoal.files import copy_tree
from shoal.model.dtype import DeviceError, DtypeName
from shoal.validator.by_hand import offline_assignment
from shoal.validator.checks import EXPENSIVE
from shoal.validator.judge import Judge
from shoal.worker.produce import Producer

from ..workers import ALICE, config

CONFIG = config(sampling={"max_tokens": 12, "group_size": 2})
ASSIGNMENT = offline_assignment(CONFIG, ALICE.public, 0)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def _always_both_dtypes() -> Iterator[None]:
    """Measure both dtypes, however fast this machine is in each, with the same seeds each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.cli.calibrate.Identity.generate", lambda: ALICE)
        patch.setattr("shoal.cli.calibrate.measure_gflops", lambda dtype, device: 1.0)
        yield


@pytest.fixture(scope="module")
def out(one_thread: None, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration") / "made"
    lines: list[str] = []
    calibrate(CONFIG, folder, 1, [tiny_folder], [], [], lines.append)
    assert "judged 16 times" in lines[-2] and "would have rejected it 0 times" in lines[-2]
    return folder


def test_the_limits_are_the_worst_values_times_a_margin(out: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(config_module.dumps(CONFIG))
    resolved = config_module.load(base, [], [out / "limits.toml"])
    measured = json.loads((out / "measured.json").read_text())
    for statistic, (limit, floor, margin) in LIMITS.items():
        worst = max(row[statistic] for row in measured["rows"])
        assert worst == measured["worst"]["torch"][statistic]
        assert getattr(resolved.validator, limit) == pytest.approx(max(margin * worst, floor), abs=1e-4)
    assert resolved.validator.check_floor == CONFIG.validator.check_floor, "a field without a measured limit must stay"


def test_the_bounds_hold_for_the_noisiest_pair(out: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(config_module.dumps(CONFIG))
    evidence = config_module.load(base, [], [out / "limits.toml"]).evidence
    pairs = json.loads((out / "measured.json").read_text())["pairs"]
    assert set(pairs) == {f"{made}|{judged}" for made in ("float32", "bfloat16") for judged in ("float32", "bfloat16")}
    for name in AVERAGES:
        assert getattr(evidence, name) >= max(pair[name] for pair in pairs.values())
        assert evidence.rates == tuple(sorted(evidence.rates, reverse=True))
    for pair in pairs.values():
        assert all(
            rate > beyond / pair["exposure"] for rate, beyond in zip(evidence.rates, pair["beyond"], strict=True)
        )


def test_bounds_count_misses_beyond_fractions_of_the_new_limit() -> None:
    row = {"exposure": 100.0, "misses": [0.01, 0.2, 0.5, 2.0]} | dict.fromkeys(AVERAGES, 0.001)
    noisy = row | {"worker": {"dtype": "bfloat16"}, "validator": {"dtype": "float32"}}
    quiet = row | {"worker": {"dtype": "float32"}, "validator": {"dtype": "float32"}, "misses": []}
    pairs = by_pair([noisy, noisy, quiet], 0.8)
    assert pairs["bfloat16|float32"]["beyond"] == [8, 6, 4, 2] and pairs["bfloat16|float32"]["exposure"] == 200
    assert pairs["float32|float32"]["beyond"] == [0, 0, 0, 0]
    evidence = bounds(pairs)
    assert evidence["rates"] == pytest.approx([0.135, 0.105, 0.075, 0.045]), "each rate must be 3 (misses + 1) / 200"
    assert evidence["logprob_error_mean"] == pytest.approx(0.02 / 1.5, abs=1e-5), "figures near 0 must give the floor"


def test_every_worker_condition_is_measured_under_every_validator_condition(out: Path) -> None:
    rows = json.loads((out / "measured.json").read_text())["rows"]
    workers = {json.dumps(row["worker"]) for row in rows}
    validators = {json.dumps(row["validator"]) for row in rows}
    assert (len(workers), len(validators), len(rows)) == (4, 4, 16)
    assert any(row["logprob_error_mean"] > 1e-4 for row in rows), "different dtypes must give different logprobs"
    alike = [row for row in rows if row["worker"]["dtype"] == row["validator"]["dtype"] == "float32"]
    assert max(row["logprob_error_mean"] for row in alike) < 1e-4
    assert all(row["rollouts"] == 4 and row["failed_checks"] == 0 for row in rows)


def test_work_of_each_device_is_judged_on_each_device(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[str, set[object]] = {"worker": set(), "validator": set()}

    class RecordingEngine(TorchEngine):
        def load(self, folder: Path) -> None:
            used["worker"].add(torch.device(self.device))
            super().load(folder)

    class RecordingJudge(Judge):
        def load(self, folder: Path) -> None:
            used["validator"].add(self.config.model.device)
            super().load(folder)

    monkeypatch.setattr("shoal.cli.calibrate.TorchEngine", RecordingEngine)
    monkeypatch.setattr("shoal.cli.calibrate.Judge", RecordingJudge)
    one_dtype = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"dtype": "float32"})})
    devices = ["cpu", "cpu:0"]  # two names of one device
    calibrate(one_dtype, tmp_path, 1, [tiny_folder], devices, [], lambda _: None)
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert list(measured["pairs"]) == [
        "float32|float32",
        "float32|cpu:0 float32",
        "cpu:0 float32|float32",
        "cpu:0 float32|cpu:0 float32",
    ]
    by_devices = {(row["worker"]["device"], row["validator"]["device"]) for row in measured["rows"]}
    assert by_devices == set(itertools.product(devices, devices))
    assert used == {"worker": {torch.device("cpu"), torch.device("cpu:0")}, "validator": {"cpu", "cpu:0"}}


def test_a_missing_device_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match='^device "nonsense" cannot be used here'):
        calibrate(CONFIG, tmp_path / "out", 1, [], ["cpu", "nonsense"], [], lambda _: None)
    vllm = CONFIG.model_copy(update={"workers": CONFIG.workers.model_copy(update={"engines": ["vllm"]})})
    with pytest.raises(UserError, match="vLLM computes on model.device = cpu: add it to --devices"):
        calibrate(vllm, tmp_path / "out", 1, [], ["cpu:0"], [], lambda _: None)


def changed(out: Path, copy: Path, file: str, change: Callable[[bytes], bytes]) -> Path:
    """Copy a calibration with one file changed in its second worker's folder. Return the copy."""
    copy_tree(out, copy)
    path = copy / "work" / "001" / file
    data = path.read_bytes()
    path.unlink()  # it is a hard link
    path.write_bytes(change(data))
    return copy


def test_work_of_another_machine_is_judged_beside_the_own_work(out: Path, tiny_folder: Path, tmp_path: Path) -> None:
    changed(out, tmp_path / "other", "worker.json", lambda data: data.replace(b'"cpu"', b'"cuda"'))
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        calibrate(CONFIG, Path("made"), 1, [tiny_folder], [], [Path("other")], lines.append)
    assert "work of other was judged 16 times; the config's own limits would have rejected it 0 times" in lines
    measured = json.loads((tmp_path / "made" / "measured.json").read_text())
    theirs = [row for row in measured["rows"] if "machine" in row["worker"]]
    assert len(measured["rows"]) == 32 and len(theirs) == 16
    assert {pair for pair in measured["pairs"] if pair.endswith("|float32")} == {
        "float32|float32",
        "bfloat16|float32",
        "other float32|float32",
        "other cuda float32|float32",
        "other bfloat16|float32",
    }
    key = "logprob_error_mean"
    same = json.loads((out / "measured.json").read_text())["pairs"]["bfloat16|float32"][key]
    assert measured["pairs"]["other bfloat16|float32"][key] == same, "the same work must give the same figures"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("worker.json", lambda data: b"{}", "worker.json is not what `shoal calibrate` writes: worker: Field required"),
        (
            "worker.json",
            lambda data: data.replace(b'"temperature":1.0', b'"temperature":0.7'),
            "with another [sampling]",
        ),
        ("000000.parquet", lambda data: b"PAR1", "000000.parquet cannot be read: "),
    ],
)
def test_work_that_cannot_be_judged_is_refused_before_anything_is_measured(
    out: Path, tiny_folder: Path, tmp_path: Path, file: str, change: Callable[[bytes], bytes], message: str
) -> None:
    other = changed(out, tmp_path / "other", file, change)
    with pytest.raises(UserError, match=re.escape(message)):
        calibrate(CONFIG, tmp_path / "made", 1, [tiny_folder], [], [other], print)
    assert not list((tmp_path / "made").iterdir())


def test_less_work_than_this_machines_or_work_of_other_weights_is_refused(
    out: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Little work says little about how often tokens differ, and would widen the bounds."""

    def refused(other: Path, weights: Path, submissions: int) -> str:
        with pytest.raises(UserError) as caught:
            calibrate(CONFIG, tmp_path / "made", submissions, [weights], [], [other], print)
        return str(caught.value)

    trained = tmp_path / "trained"
    trained.mkdir()
    assert "trained holds no weights" in refused(out, trained, 1)
    (trained / "model.safetensors").write_bytes(b"other weights")
    assert "has work of other weights: name a copy of them with --weights" in refused(out, trained, 1)
    assert "work/000 has 1 submissions, fewer than 2" in refused(out, tiny_folder, 2)
    assert "has no work: run `shoal calibrate`" in refused(tmp_path, tiny_folder, 1)


def test_a_folder_that_calibration_did_not_write_is_not_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "work" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.touch()
    with pytest.raises(UserError, match=f"^{thesis} is not from `shoal calibrate`.*: choose another --out$"):
        calibrate(CONFIG, tmp_path, 1, [tiny_folder], [], [], print)
    assert thesis.exists()


def test_the_limits_of_an_engine_are_named_after_the_engine_in_the_file(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeVllm(TorchEngine):
        def __init__(self, dtype: DtypeName, threads: int) -> None:
            super().__init__(dtype, "cpu")

        def close(self) -> None:
            pass

    monkeypatch.setattr("shoal.cli.calibrate.VllmEngine", FakeVllm)
    model = CONFIG.model.model_copy(update={"dtype": "float32"})
    workers = CONFIG.workers.model_copy(update={"engines": ["vllm"]})
    with_vllm = CONFIG.model_copy(update={"model": model, "workers": workers})
    calibrate(with_vllm, tmp_path, 1, [tiny_folder], [], [], print)
    assert list(tomllib.loads((tmp_path / "limits.toml").read_text())["validator"]["limits"]) == ["vllm/cpu"]


def test_each_kind_of_engine_has_its_own_limits(tmp_path: Path) -> None:
    row = {"exposure": 100.0, "misses": [], "failed_checks": 0.0, "validator": {"dtype": "float32"}}
    rows = [
        row | {"kind": kind, "worker": {"dtype": "float32"}} | dict.fromkeys(LIMITS, worst)
        for kind, worst in (("torch", 0.0), ("vllm/cpu", 10.0), ("vllm/cuda", 20.0))
    ]
    write_limits(CONFIG, tmp_path, rows)
    limits = tomllib.loads((tmp_path / "limits.toml").read_text())["validator"]
    assert [limits["limits"][kind]["sampling_margin"] for kind in ("vllm/cpu", "vllm/cuda")] == [15.0, 30.0]
    assert limits["sampling_margin"] == 0.75


@pytest.mark.parametrize("out", ["file", "file/made"])
def test_a_file_in_place_of_the_folder_is_refused_before_anything_is_measured(
    tiny_folder: Path, tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^{tmp_path / out} cannot be a folder, because a file is there"):
        calibrate(CONFIG, tmp_path / out, 1, [tiny_folder], [], [], lambda line: pytest.fail(line))


@pytest.fixture(scope="module")
def judge(one_thread: None, tiny_folder: Path) -> Iterator[Judge]:
    with Judge(CONFIG, RUN, "float32") as judge:
        judge.load(tiny_folder)
        yield judge


def submission_of(kind: type[Producer], folder: Path) -> bytes:
    producer = kind(CONFIG, RUN, ALICE, TorchEngine("float32"))
    producer.load(folder, 0)
    return producer.submission(ASSIGNMENT)


def test_work_that_fails_a_check_without_a_limit_is_refused(judge: Judge, tiny_folder: Path) -> None:
    data = submission_of(Producer, tiny_folder)
    assert honest_figures(judge, ASSIGNMENT, ALICE.public, data)["failed_checks"] == 0
    with pytest.raises(ShoalError, match="fails a cheap check"):
        honest_figures(judge, offline_assignment(CONFIG, ALICE.public, 1), ALICE.public, data)
    with pytest.raises(ShoalError, match="cannot be read"):
        honest_figures(judge, ASSIGNMENT, ALICE.public, data[:-1])


def test_figures_beyond_the_current_limits_are_measured(judge: Judge, tiny_folder: Path) -> None:
    figures = honest_figures(judge, ASSIGNMENT, ALICE.public, submission_of(QuantizedWeights, tiny_folder))
    assert 1 <= figures["failed_checks"] <= len(EXPENSIVE) and set(LIMITS) <= set(figures)


def test_calibration_fails_if_honest_work_fails_a_cheap_check(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_short(self: Producer, *arguments: object) -> list[object]:
        return rollouts(self, *arguments)[:-1]  # type: ignore[arg-type]

    rollouts = Producer.rollouts
    monkeypatch.setattr(Producer, "rollouts", one_short)
    path = tmp_path / "config.toml"
    path.write_text(config_module.dumps(CONFIG))
    arguments = ["--submissions", "1", "--weights", str(tiny_folder), "--out", str(tmp_path / "out")]
    threads = torch.get_num_threads()
    assert main(["calibrate", str(path), *arguments]) == FAILED
    assert "fails a cheap check: 3 rollouts instead of 4" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.*")) and torch.get_num_threads() == threads
