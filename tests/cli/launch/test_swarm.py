"""Whole runs of the tiny model, with every process and real HTTP. Slow tests kill processes and add dishonest workers."""

import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.trust.adversary.cheats import CHEATS
from benchmarks.trust.byzantine import liars
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.cli import main
from shoal.cli.launch.members import LOCK
from shoal.cli.launch.swarm import Swarm
from shoal.config import load, parse
from shoal.errors import ShoalError
from shoal.model import numerics
from shoal.model.sources import resolve
from shoal.protocol.invite import Address

from ..support import sets, wait_until
from .runs import CONFIGS, DEADLINE_S, MIN_GAIN, children, command, gain, refused, start, summary_of, trained_steps

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PAIR = ["--set", "validator.count=2"]  # one validator alone slashes nobody
EXPECTED = {
    "older_weights": "proof",
    "quantized_weights": "proof",
    "wrong_temperature": "sampling",
    "replayed_submission": "tasks",
}

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def committed_gains(name: str) -> list[float]:
    """Return the gains of the runs in a file that `python -m benchmarks.learning.runs tiny --label NAME` wrote."""
    return [gain(run) for run in json.loads((RESULTS / f"{name}.json").read_text())["runs"]]


STEPS = 8
SMALL = [f"run.steps={STEPS}", "coordinator.prompts_per_step=8", "workers.groups_per_submission=4", "evaluator.n=32"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run configs/tiny.toml with fewer and smaller steps. Return the run's folder and output."""
    out = tmp_path_factory.mktemp("swarm") / "run"
    swarm = start(out, *sets(*SMALL))
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    return out, printed


@pytest.mark.slow
def test_a_swarm_learns(tmp_path: Path) -> None:
    swarm = start(tmp_path / "run")
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    assert gain(summary_of(tmp_path / "run")) >= MIN_GAIN


def test_a_swarm_trains_on_verified_rollouts(finished: tuple[Path, str]) -> None:
    summary = summary_of(finished[0])
    assert summary["rejected"] == {"worker-0": 0, "worker-1": 0}
    exact = summary["exact"]  # all tokens if this machine passes the self-test, else none
    assert exact["tokens"] in (0, summary["tokens_generated"]) and exact["mismatched_tokens"] == 0
    assert min(summary["accepted"].values()) > 0
    assert summary["max_staleness"] <= 2
    assert sum(summary["restarts"].values()) == 0
    assert summary["cpu_s"].keys() == summary["peak_rss_bytes"].keys() >= {"learner", "worker-0", "validator"}


def test_the_bound_separates_learning_runs_from_non_learning_runs() -> None:
    honest = committed_gains("tiny-learning")
    # A new run misses the bound with a probability under 1e-4: Student's t with 9 degrees of freedom exceeds 6.02 that
    # rarely.
    assert len(honest) >= 10
    spread = statistics.stdev(honest) * (1 + 1 / len(honest)) ** 0.5
    assert (statistics.mean(honest) - MIN_GAIN) / spread >= 6.02
    assert committed_gains("tiny-no-learning") == [0.0, 0.0, 0.0], (
        "runs with a learning rate of 1e-12 must gain exactly 0"
    )


def test_nothing_is_left_running(finished: tuple[Path, str]) -> None:
    assert children(finished[0]) == {}


def test_the_trained_model_loads_in_transformers(finished: tuple[Path, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished[0] / "model")
    ids = tokenizer("<bos>12 + 34=", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1]).isdigit()


def test_a_finished_run_passes_its_audit(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(finished[0]), "--rerun", "0", "--proofs", "0"]) == 0
    assert f"steps: {STEPS} trained, each on exactly the groups of its batch" in capsys.readouterr().out


def test_a_finished_run_keeps_its_results_and_no_caches(finished: tuple[Path, str]) -> None:
    out, printed = finished
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert trained_steps(out) == STEPS
    assert "held-out greedy" in printed
    assert 'dtype = "auto"' not in (out / "config.toml").read_text()
    assert re.search(r"ok +disk +up to ", printed) and "of caches freed" in printed
    assert {path.name for path in (out / "learner" / "versions").iterdir()} == {f"v{STEPS - 1:06d}", f"v{STEPS:06d}"}
    assert [path.name for path in (out / "learner" / "checkpoints").iterdir()] == [f"step-{STEPS:06d}"]
    assert not list(out.glob("*/weights")) and not (out / "relay-0" / "store").exists()


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("coordinator", ["listening at http"]),
        (
            "learner",
            ["joined run tiny-0", f"version {STEPS} is written", f"step {STEPS} trained", "the trained model is in"],
        ),
        ("origin", ["listening at http", f"version {STEPS} is published"]),
        ("relay-0", ["joined run tiny-0", f"version {STEPS} is mirrored"]),
        ("worker-0", ["is loaded", "groups for step", "is uploaded", "ended: finished"]),
        ("validator", ["is loaded", ": accepted"]),
        ("evaluator", ["version 0 is evaluated: greedy 0.", f"version {STEPS} is evaluated"]),
    ],
)
def test_a_node_logs_each_event(finished: tuple[Path, str], node: str, words: list[str]) -> None:
    text = (finished[0] / "logs" / f"{node}.log").read_text()
    assert [word for word in words if word not in text] == []


def test_resuming_a_finished_run_changes_nothing(finished: tuple[Path, str]) -> None:

    def files() -> dict[Path, int]:
        paths = [path for path in finished[0].rglob("*") if path.is_file() and ".sqlite" not in path.name]
        return {path: path.stat().st_mtime_ns for path in paths}

    before = files()
    status, printed = refused("--resume", finished[0])
    assert status == 0
    assert f"the run has trained its {STEPS} steps; to train more: shoal run --resume" in printed
    assert files() == before


def test_a_run_is_resumed_with_more_steps(finished: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    before = (run / "metrics.jsonl").read_text().splitlines()
    resume = command("--resume", run, "--set", f"run.steps={len(before) + 2}")
    done = subprocess.run(resume, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert after[: len(before)] == before
    assert [json.loads(line)["step"] for line in after[len(before) :]] == [len(before), len(before) + 1]
    assert (run / "learner" / "versions" / f"v{len(before) + 2:06d}").is_dir()
    summary, first = summary_of(run), summary_of(finished[0])
    assert not any(summary["rejected"].values())
    assert summary["wall_s"] > first["wall_s"] and summary["tokens_trained"] > first["tokens_trained"], (
        "the summary must cover both parts of the run"
    )
    assert summary["peak_together_bytes"] >= first["peak_together_bytes"]
    assert summary["cpu_s"]["learner"] >= first["cpu_s"]["learner"]


def test_a_resume_with_a_wrong_config_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, command: list[str], module: str) -> str:
        assert load(Path(command[0])).model.name == "./nowhere"
        raise ShoalError("no model at nowhere")

    (tmp_path / "config.toml").write_text("[run]\nsteps = 3\n")
    monkeypatch.setattr(os, "environ", dict(os.environ))  # `Swarm` sets variables for its children
    swarm = Swarm(parse({"model": {"name": "./nowhere"}}), "run", tmp_path, "http://127.0.0.1:9")
    monkeypatch.setattr(swarm.children, "run", refuse)
    with pytest.raises(ShoalError):
        swarm._prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert (tmp_path / "config.toml").read_text() == "[run]\nsteps = 3\n"


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"], ids=["new", "resumed"])
def test_tasks_of_a_failed_preparation_are_built_again_but_not_those_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    tasks, present = tmp_path / "run" / "coordinator" / "tasks", []

    def refuse(name: str, command: list[str], module: str) -> str:
        present.append(tasks.exists())
        tasks.mkdir(parents=True, exist_ok=True)
        raise ShoalError("the reward fails")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    for _ in range(2):
        swarm = Swarm(parse({}), "run", tmp_path / "run", url)
        monkeypatch.setattr(swarm.children, "run", refuse)
        with pytest.raises(ShoalError, match="the reward fails"):
            swarm.run()
    assert present == [False, bool(url)]


def test_a_begun_run_is_not_continued_without_resume_even_if_its_tables_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / LOCK).touch()
    (tmp_path / "coordinator").mkdir()
    Address(url="http://127.0.0.1:9", run="run-0").write(tmp_path / "coordinator")
    swarm = Swarm(parse({"coordinator": {"database": "postgresql://db/shoal"}}), "run", tmp_path)
    monkeypatch.setattr(swarm, "_prepare", lambda: pytest.fail("the run was prepared"))
    with pytest.raises(ShoalError, match="is not empty"):
        swarm.run()


def test_a_taken_dashboard_port_is_reported_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        swarm = Swarm(parse({}), "run", tmp_path / "run", dashboard=port)
        monkeypatch.setattr(swarm, "_prepare", lambda: pytest.fail("the run was prepared"))
        with pytest.raises(ShoalError, match=f"the dashboard cannot listen at 127.0.0.1:{port}"):
            swarm.run()


@pytest.mark.usefixtures("ipv6")
@pytest.mark.parametrize("port", [0, 8700])
def test_the_coordinator_may_listen_on_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    swarm = Swarm(parse({"coordinator": {"listen": f"[::1]:{port}"}}), "run", tmp_path)
    words = swarm._coordinator_command()
    bound = words[words.index("--port") + 1]
    assert swarm.url == f"http://[::1]:{bound}" and int(bound) in ({port} if port else range(1, 65536))


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        more = ("--set", f"coordinator.listen=127.0.0.1:{port}", "--set", "model.dtype=float32")
        status, printed = refused(CONFIGS / "tiny.toml", "--out", tmp_path / "run", *more)
    assert status == 1
    assert "address already in use" in printed
    assert str(port) in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("out", "more", "words"),
    [
        ("run", ["--set", "model.name=./nowhere"], "no model at"),
        (".", [], "not empty"),
        ("file/run", [], "cannot write to"),
    ],
)
def test_a_run_that_cannot_start_is_refused_with_the_reason(
    tmp_path: Path, out: str, more: list[str], words: str
) -> None:
    (tmp_path / "file").write_text("keep me")
    for _ in range(2):  # nothing started, so the folder can be used again
        status, printed = refused(CONFIGS / "tiny.toml", "--out", tmp_path / out, *more)
        assert status == 1 and words in printed and "Traceback" not in printed
    assert (tmp_path / "file").read_text() == "keep me"


@pytest.mark.slow
def test_the_children_of_a_killed_swarm_end(tmp_path: Path) -> None:
    swarm = start(tmp_path / "run", "--set", "model.dtype=float32")
    wait_until(lambda: len(children(tmp_path / "run")) >= 8, DEADLINE_S, "eight processes")
    swarm.kill()
    swarm.wait()
    wait_until(lambda: children(tmp_path / "run") == {}, DEADLINE_S, "the children to end")


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    swarm = start(tmp_path / "run", "--set", "model.dtype=float32")
    wait_until(lambda: len(children(tmp_path / "run")) >= 8, DEADLINE_S, "eight processes")
    swarm.send_signal(signal.SIGINT)
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 130
    assert children(tmp_path / "run") == {}
    assert "Traceback" not in printed and "leaked" not in printed
    assert f"resume with: shoal run --resume {tmp_path / 'run'}" in printed


@pytest.mark.slow
def test_kill_9_of_the_fork_server_is_survived(tmp_path: Path) -> None:
    out = tmp_path / "run"
    swarm = start(out)
    wait_until(lambda: trained_steps(out) >= 5, DEADLINE_S, "five steps")
    before = children(out)
    psutil.Process(before["learner"]).parent().kill()
    wait_until(
        lambda: not set(before.values()) & set(children(out).values()), DEADLINE_S, "the children to be replaced"
    )
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    assert min(summary_of(out)["restarts"].values()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["coordinator", "learner", "origin", "relay-0", "validator", "worker-0", "evaluator"]
)
def test_kill_9_of_any_process_is_survived(victim: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    swarm = start(out)
    wait_until(lambda: trained_steps(out) >= 5, DEADLINE_S, "five steps")
    os.kill(children(out)[victim], signal.SIGKILL)
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    summary = summary_of(out)
    assert summary["restarts"][victim] >= 1
    assert sum(summary["rejected"].values()) == 0
    assert gain(summary) >= MIN_GAIN
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == list(range(24))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(EXPECTED))
def test_a_dishonest_worker_is_rejected_and_slashed(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    swarm = start(out, *PAIR)
    with liars(swarm, out, [kind]):
        printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    summary = summary_of(out)
    assert summary["slashed"] == ["cheater"]
    assert set(summary["reject_reasons"]) == {EXPECTED[kind]}
    assert summary["accepted"]["cheater"] == 0
    assert summary["rejected"]["cheater"] >= 1
    assert summary["rejected"]["worker-0"] == summary["rejected"]["worker-1"] == 0
    assert gain(summary) >= MIN_GAIN


@pytest.mark.slow
def test_a_worker_with_a_faked_fingerprint_is_not_slashed_but_a_liar_is(tmp_path: Path) -> None:
    if numerics.refusal("float32"):
        pytest.skip(f"no exact numerics here: {numerics.refusal('float32')}")
    out = tmp_path / "run"
    swarm = start(out, "--set", "model.dtype=float32", *PAIR)
    with liars(swarm, out, ["faked_fingerprint", "quantized_weights"]):
        printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    summary = summary_of(out)
    assert summary["slashed"] == ["cheater-1"]
    assert summary["reject_reasons"].keys() == {"inexact", EXPECTED["quantized_weights"]}
    assert summary["accepted"]["cheater-1"] == 0
    assert summary["rejected"]["cheater-0"] == summary["reject_reasons"]["inexact"] >= 1
    exact = summary["accepted"]["worker-0"] + summary["accepted"]["worker-1"]
    assert summary["exact"]["submissions"] == exact, "work with the faked fingerprint must not count as exact"
    assert summary["rejected"]["worker-0"] == summary["rejected"]["worker-1"] == 0
    assert summary["exact"]["tokens"] > 0 and summary["exact"]["mismatched_tokens"] == 0


@pytest.mark.slow
def test_a_run_with_adapters_writes_a_model_without_adapters(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ("learner.lora.rank=4", "learner.lr=1e-3", "run.steps=3", "evaluator.n=16")
    swarm = start(out, *sets(*settings))
    printed, _ = swarm.communicate(timeout=DEADLINE_S)
    assert swarm.returncode == 0, printed
    trained, base = (load_file(folder / "model.safetensors") for folder in (out / "model", resolve("bundled:tiny")))
    assert trained.keys() == base.keys()
    changed = [name for name in base if not torch.equal(trained[name].float(), base[name].float())]
    assert changed and all("proj" in name for name in changed)
    assert main(["audit", str(out)]) == 0
    trained[changed[0]][0, 0] += 1e-3
    save_file(trained, out / "model" / "model.safetensors")
    assert main(["audit", str(out)]) == 1


# --- a tool ----------------------------------------------------------------------------------------------------------

SFT = """
[sft]
data = "{data}"
epochs = 1
batch = 64
lr = 1e-3
warmup_steps = 5
checkpoint_every = 0
"""
SHORT = (
    "model.dtype=float32", "run.steps=12", "sampling.max_tokens=48", "sampling.max_turns=2", "evaluator.n=16",
    "coordinator.prompts_per_step=8", "coordinator.online_filter=false", "workers.groups_per_submission=4",
)  # fmt: skip
TURNS = (
    "<bos>{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)


def calling_config(folder: Path) -> Path:
    """Write a config of the tiny model, with conversations that teach it to call the calculator. Return its path."""
    shutil.copytree(resolve("bundled:tiny"), folder / "start")
    (folder / "start" / "chat_template.jinja").write_text(TURNS)
    draw = random.Random(0)
    with (folder / "calls.jsonl").open("w") as calls:
        for a, b in ((draw.randrange(10, 99), draw.randrange(10, 99)) for _ in range(2560)):
            texts = [f"{a} + {b}=", f"calc({a} + {b})", str(a + b), str(a + b)]
            roles = ["user", "assistant"] * 2
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            calls.write(json.dumps({"messages": messages}) + "\n")
    text = (CONFIGS / "tiny.toml").read_text()
    text = text.replace("operand_max = 99 }", 'operand_max = 99 }\nenvironment = "calculator"')
    path = folder / "calling.toml"
    path.write_text(text + SFT.format(data=folder / "calls.jsonl"))
    return path


def test_every_kind_of_cheat_is_covered_by_a_whole_run() -> None:
    assert {*EXPECTED, "forged_tool", "faked_fingerprint"} == set(CHEATS)


@pytest.mark.slow
def test_a_worker_that_forges_a_tools_answers_is_slashed(tmp_path: Path) -> None:
    path, out = calling_config(tmp_path), tmp_path / "run"
    for verb, model, folder, lies in (
        ("sft", tmp_path / "start", tmp_path / "sft", []),
        ("run", tmp_path / "sft" / "model", out, ["forged_tool"]),
    ):
        argv = [sys.executable, "-m", "shoal", verb, str(path), "--out", str(folder), "--set", f"model.name={model}"]
        argv += [*sets(*SHORT), *PAIR]
        started = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with liars(started, folder, lies):
            printed, _ = started.communicate(timeout=DEADLINE_S)
        assert started.returncode == 0, printed
    summary = summary_of(out)
    assert summary["slashed"] == ["cheater"]
    assert set(summary["reject_reasons"]) == {"environment"}
    assert summary["accepted"]["cheater"] == 0
    assert summary["rejected"]["worker-0"] == summary["rejected"]["worker-1"] == 0
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert min(step["completion/turns_mean"] for step in metrics) > 1.5, "the model did not call the tool"
