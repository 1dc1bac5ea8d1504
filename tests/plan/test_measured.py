"""The arithmetic against runs whose raw figures are committed, at the speeds of their CPUs' own benchmarks."""

import json
import statistics
from pathlib import Path

import pytest

from shoal.config import Config, load
from shoal.launch.cores import share_threads
from shoal.learner import metrics
from shoal.plan import BUNDLED, Device, Fleet, Links, Plan, Work, memory_of, plan, work_of
from shoal.plan.steps import broadcast_s
from shoal.plan.work import forward_flops

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Achieved speeds, of both cores; the sources are in plan/devices.py. X decodes with two threads: 31 ms for the weights and
# 2.3 ms a completion; E with one: 26 ms and 1.6 ms.
XEON = Device(
    "X", 1327e9, 8.6e9, 25e9, training=0.40, prefill=0.42, attention=0.045, decode=0.089, reading=1.0, cpu=True
)
EPYC = Device(
    "E", 944e9, 20.6e9, 25e9, training=0.475, prefill=0.46, attention=0.05, decode=0.34, reading=1.0, cpu=True
)
# `shoal run` on GSM8K, as benchmarks/trl.py set it: its workload b at commit 775f024.
GSM8K = (
    "coordinator.online_filter=false",
    "coordinator.async_level=1",
    "workers.count=1",
    "workers.groups_per_submission=8",
    "learner.activation_checkpointing=false",
    "learner.row_tokens=1024",
    "tasks.length_targets=[128]",
)
GSM8K_PROMPT, GSM8K_LENGTH = 120, 210  # tokens: the first by benchmarks/trl.py, the second by the run
PROMPT = {"quickstart": 26, "tiny": 6}  # tokens
COUNTS = {"coordinator": 1, "origin": 1, "relay": 1, "learner": 1, "worker": 2, "validator": 1, "evaluator": 1}


def measured(name: str) -> list[dict[str, object]]:
    runs: list[dict[str, object]] = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    return runs


def steps(run: dict[str, object]) -> list[dict[str, float]]:
    return run["metrics"][2:]  # type: ignore[index, no-any-return]


def work(config: str, runs: list[dict[str, object]]) -> Work:
    """What the steps of these runs computed, by their own mean lengths and share of useful groups."""
    settings = load(ROOT / "configs" / f"{config}.toml")
    rows = [row for run in runs for row in steps(run)]
    length = round(statistics.fmean(row["completion/length_mean"] for row in rows))
    flat = statistics.fmean(row.get("reward/zero_std_frac", 0.0) for row in rows)
    return work_of(settings, prompt=PROMPT[config], length=length, useful=1 - flat)


def step_s(runs: list[dict[str, object]]) -> float:
    """Mean seconds from the second step to the last."""
    times = [[row["time_s"] for row in run["metrics"]] for run in runs]  # type: ignore[attr-defined]
    return statistics.fmean((each[-1] - each[1]) / (len(each) - 2) for each in times)


@pytest.mark.parametrize(
    ("config", "name", "device", "within"),
    [
        ("quickstart", "quickstart", EPYC, 0.25),
        ("quickstart", "quickstart-exact", XEON, 0.25),
        ("quickstart", "quickstart-fast", XEON, 0.25),
        ("tiny", "tiny-exact", XEON, 0.25),
        ("tiny", "tiny-learning", EPYC, 0.40),  # a busy machine: 1.6 to 3 s by seed, and products are the least of it
    ],
)
def test_the_step_time_of_whole_runs(config: str, name: str, device: Device, within: float) -> None:
    runs = measured(name)
    does = work(config, runs)
    settings = load(ROOT / "configs" / f"{config}.toml")
    assert planned(settings, does, device).step_s == pytest.approx(step_s(runs), rel=within)


def planned(config: Config, does: Work, device: Device) -> Plan:
    """All of `shoal run` on two cores."""
    threads, fleet = share_threads(config, 2), Fleet(device)
    shares = {
        "learner": threads["learner"] / 2,
        "rollouts": threads["worker"] * config.workers.count / 2,
        "validation": threads["validator"] / 2,
    }
    level = config.coordinator.async_level
    return plan(BUNDLED[config.model.name], does, 2, level, fleet, fleet, fleet, Links(), shares=shares)


def test_the_step_time_of_long_completions() -> None:
    """GSM8K: 64 completions of about 210 tokens. The first step is longer, and the last has no generation beside it."""
    raw = json.loads((RESULTS / "trl-completions-run.json").read_text())["measurement b"]
    [run] = raw["runs"]
    took_s = statistics.fmean(step["seconds"] for step in run["steps"][1:])
    assert statistics.fmean(step["tokens"] for step in run["steps"]) / 64 == pytest.approx(GSM8K_LENGTH, rel=0.03)
    settings = load(ROOT / "configs" / "gsm8k.toml", GSM8K)
    does = work_of(settings, prompt=GSM8K_PROMPT, length=GSM8K_LENGTH)
    assert planned(settings, does, EPYC).step_s == pytest.approx(took_s, rel=0.25)


@pytest.mark.parametrize("name", ["quickstart", "quickstart-exact", "quickstart-fast", "tiny-exact", "tiny-learning"])
def test_the_memory_of_whole_runs(name: str) -> None:
    config, runs = name.split("-")[0], measured(name)
    does = work(config, runs)
    memory = memory_of(BUNDLED[load(ROOT / "configs" / f"{config}.toml").model.name], does, 2)
    together = statistics.fmean(run["peak_together_bytes"] for run in runs)  # type: ignore[misc]
    assert memory.together(COUNTS) == pytest.approx(together, rel=0.25)
    for role, process in {
        "learner": "learner",
        "worker": "worker-0",
        "validator": "validator",
        "origin": "origin",
    }.items():
        peak = statistics.fmean(run["peak_rss_bytes"][process] for run in runs)  # type: ignore[index]
        assert memory.roles[role] == pytest.approx(peak, rel=0.25), role


@pytest.mark.parametrize("name", ["quiet", "loss", "faults", "peers", "public", "star"])
def test_the_broadcast_over_emulated_links(name: str) -> None:
    """One origin, 4 relays, 16 workers: each shard leaves the origin once, whatever the number of relays."""
    raw = json.loads((RESULTS / f"wan-{name}.json").read_text())
    links = raw["plan"]
    planned_s = broadcast_s(
        raw["size_bytes"],
        Links(links["origin_bps"], links["relay_bps"], links["client_bps"], links["relays"]),
        links["clients"],
    )
    seconds = [transfer["seconds"] for transfer in raw["transfers"] if transfer["system"] == "shoal"]
    assert planned_s == pytest.approx(statistics.median(seconds), rel=0.25)


def test_flops_are_those_that_the_learner_reports() -> None:
    sizes = BUNDLED["bundled:smollm2-135m-instruct"]
    does = work("quickstart", measured("quickstart-exact"))
    shape = metrics.Shape(body=sizes.body, head=sizes.head, layers=sizes.layers, width=sizes.width)
    assert forward_flops(sizes, does) == metrics.forward_flops(shape, does.prompt, [does.length] * does.completions)


def test_bundled_sizes_are_the_models_own() -> None:
    from shoal.model import sources
    from shoal.plan import sizes_of

    for name, sizes in BUNDLED.items():
        found = sources.read_config(name, fetch=False)
        if "hidden_size" in found:  # it was made on this machine
            assert sizes_of(found) == sizes


def test_a_fleet_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.main import DONE, USAGE, main

    fleets = [
        "--learner",
        "2xh100@2.5",
        "--workers",
        "4xflops=1e14,bandwidth=1e12,memory=24e9",
        "--validators",
        "l40s@1",
    ]
    assert main(["plan", "quickstart", *fleets, "--worker-down", "100Mb", "--json"]) == DONE
    report = json.loads(capsys.readouterr().out)
    assert report["seconds"]["broadcast"] == pytest.approx(8 * 2 * report["parameters"] / 100e6)
    assert report["step_cost"] == pytest.approx(6 * report["step_s"] / 3600)
    assert report["does_not_fit"] == []
    assert main(["plan", "quickstart", "--learner", "h100"]) == USAGE
    assert "--workers, --validators is missing" in capsys.readouterr().err
    assert main(["plan", "quickstart", *fleets[:5], "abacus"]) == USAGE
    assert "no device 'abacus'" in capsys.readouterr().err
