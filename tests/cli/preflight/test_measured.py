"""The estimated memory agrees with committed measurements of runs, and the bundled sizes with the models."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from shoal.cli.preflight.estimate import BUNDLED, COMPUTE_BYTES, memory_of, processes, sizes_of, together, work_of
from shoal.config import load

ROOT = Path(__file__).parents[3]
PROMPT = {"quickstart": 26, "tiny": 6}  # tokens
ROLES = {"learner": "learner", "worker-0": "worker", "validator": "validator", "origin": "origin"}
# the settings of quickstart.toml when the runs of 16 steps were made
LONGER = ("sampling.max_tokens=16", "learner.row_tokens=2048", "learner.activation_checkpointing=true")


@pytest.mark.parametrize(
    "name", ["tiny-exact", "quickstart-exact", "quickstart-fast", "quickstart", "quickstart-float32"]
)
def test_the_estimated_memory_is_within_a_quarter_of_the_measurement(name: str) -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["runs"]
    kind = name.partition("-")[0]
    longer = LONGER if kind == "quickstart" and runs[0]["steps"] == 16 else ()
    config = load(ROOT / "configs" / f"{kind}.toml", longer)
    roles = memory_of(BUNDLED[config.model.name], work_of(config, PROMPT[kind]), COMPUTE_BYTES[runs[0]["dtype"]])
    peak = fmean(run["peak_together_bytes"] for run in runs)
    assert together(roles, processes(config)) == pytest.approx(peak, rel=0.25)
    for process, role in ROLES.items():
        peak = fmean(run["peak_rss_bytes"][process] for run in runs)
        assert roles[role] == pytest.approx(peak, rel=0.25), process


def test_bundled_sizes_equal_those_of_the_models() -> None:
    from shoal.model import sources

    for name, sizes in BUNDLED.items():
        config = sources.read_config(name, fetch=False)
        if "hidden_size" in config:  # the model was made on this machine
            assert sizes_of(config) == sizes
