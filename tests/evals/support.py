"""A small lm_eval that answers by rule, and a console without a terminal."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

# Takes the command line of lm_eval and writes its files. A model called right-N is right about N of 10 documents of the task
# `sums`. A model called broken ends it.
LM_EVAL = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("run")
for name in ("model", "tasks", "model_args", "gen_kwargs", "output_path", "use_cache", "limit", "include_path"):
    parser.add_argument(f"--{name}")
parser.add_argument("--apply_chat_template", action="store_true")
parser.add_argument("--log_samples", action="store_true")
asked = parser.parse_args()
model = dict(part.split("=", 1) for part in asked.model_args.split(","))
sampling = dict(part.split("=", 1) for part in asked.gen_kwargs.split(","))
with open(pathlib.Path(asked.output_path).parents[1] / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({"task": asked.tasks, **model, **sampling, "limit": asked.limit}) + "\\n")
if model["model"] == "broken":
    sys.exit("the server said 503")
out = pathlib.Path(asked.output_path) / model["model"]
out.mkdir()
lines = []
if asked.include_path:  # a task that is written there: the model's name is its answer to everything
    rows = (pathlib.Path(asked.include_path) / f"{asked.tasks}.jsonl").read_text().splitlines()
    answer = model["model"].partition("-")[2]
    lines = [{"doc_id": number, "resps": [[answer]], "metrics": ["bypass"], "filter": "none"} for number in range(len(rows))]
for number in [] if asked.include_path else range(int(asked.limit or 10)):
    score = float(number < int(model["model"].partition("-")[2]))
    common = {"doc_id": number, "resps": [["text"]], "metrics": ["exact_match"]}
    lines += [common | {"filter": "strict", "exact_match": 0.0}, common | {"filter": "flexible", "exact_match": score}]
text = "".join(json.dumps(line) + "\\n" for line in reversed(lines))
(out / f"samples_{asked.tasks}_2026-01-01T00-00-00.jsonl").write_text(text)
"""


def install_lm_eval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `python -m lm_eval` the small one."""
    for name in ("lm_eval", "tenacity", "datasets"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    (folder / "lm_eval" / "__main__.py").write_text(LM_EVAL)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
