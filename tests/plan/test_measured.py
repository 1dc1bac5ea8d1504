"""The arithmetic against runs whose raw figures are committed, at the speeds of their CPUs' own benchmarks."""

import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shoal.config import load
from shoal.learner import metrics
from shoal.plan import BUNDLED, work_of
from shoal.plan.work import forward_flops

ROOT = Path(__file__).parents[2]


def compared() -> list[Any]:
    """The rows of benchmarks/plan.py, computed again."""
    spec = importlib.util.spec_from_file_location("compared_plan", ROOT / "benchmarks" / "plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return list(module.rows())


ROWS = compared()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.run}: {row.what}")
def test_planned_is_within_a_quarter_of_measured(row: Any) -> None:
    assert row.planned == pytest.approx(row.measured, rel=0.25)


def test_steps_memory_and_broadcasts_of_all_three_are_compared() -> None:
    kinds = defaultdict(set)
    for row in ROWS:
        config = next((name for name in ("tiny", "quickstart", "gsm8k", "wan") if row.run.startswith(name)), "gsm8k")
        kinds[config].add(row.what)
    for name in ("tiny", "quickstart", "gsm8k"):
        assert kinds[name] >= {"step_s", "memory_bytes", "broadcast_s"}, name
    assert kinds["wan"] == {"broadcast_s"}


def test_the_committed_comparison_is_this_one() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["compared"]
    assert [(one["run"], one["what"], one["ratio"]) for one in committed] == [
        (row.run, row.what, pytest.approx(row.ratio, abs=0.001)) for row in ROWS
    ]


def test_flops_are_those_that_the_learner_reports() -> None:
    sizes = BUNDLED["bundled:smollm2-135m-instruct"]
    does = work_of(load(ROOT / "configs" / "quickstart.toml"), prompt=26, length=12)
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


def test_offloading_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.main import USAGE, main

    device = "flops=1e14,bandwidth=1e12,memory=24e9"
    others = ["--workers", "h100", "--validators", "h100", "--set", "model.device=cuda"]
    found = []
    for fleet, offload in ((device, "false"), (device, "true"), (f"{device},pcie=1e8,host=1e8", "true")):
        main(["plan", "quickstart", "--learner", fleet, *others, "--set", f"learner.offload={offload}", "--json"])
        found.append(json.loads(capsys.readouterr().out))
    kept, offloaded, slowly = found
    assert kept["offloaded_bytes"] == 0 and offloaded["offloaded_bytes"] == 16 * kept["parameters"]
    assert offloaded["memory_bytes"]["learner"] < kept["memory_bytes"]["learner"]
    seconds = [report["seconds"]["learner"] for report in found]
    assert seconds[0] < seconds[1] < seconds[2] / 10
    assert main(["plan", "quickstart", "--learner", device, *others[:4], "--set", "learner.offload=true"]) == USAGE
    assert "learner.offload" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "hidden_size=inf"], "is not a list of FIELD=NUMBER"),
        (["--sizes", "hidden_size=4"], "--sizes lacks intermediate_size"),
        (["--learner", "0xh100"], "a fleet has at least 1 device"),
        (["--learner", "h100@1.2.3"], "is not a fleet"),
        (["--learner", "flops=1,bandwidth=0,memory=1"], "each 1 or more"),
        (["--worker-down", "1.2.3Mb"], "is not a rate"),
    ],
)
def test_odd_input_is_explained(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.main import DONE, main

    fleets = ["--learner", "h100", "--workers", "h100", "--validators", "h100"]
    try:
        status = main(["plan", "quickstart", *fleets, *words])
    except SystemExit as exit:
        status = exit.code
    assert status != DONE and said in capsys.readouterr().err


def test_a_plan_fits_80_columns_and_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.main import main

    fleets = ["--learner", "2xrtx3090@0.3", "--workers", "h100", "--validators", "h100"]
    main(["plan", "gsm8k", "--length", "210", *fleets, "--worker-down", "1Mb"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "prompts of 64 tokens, completions of 210" in said and "what sets the pace: broadcast" in said
