"""A fake lm_eval, and a console without a terminal."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

# The fake accepts lm_eval's command line and writes lm_eval's files. A model called right-N solves N of the 10
# documents of the task `sums`. For a model called broken, the fake fails.
LM_EVAL = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("run")
for name in ("model", "tasks", "model_args", "gen_kwargs", "output_path", "use_cache", "limit", "include_path"):
    parser.add_argument(f"--{name}")
parser.add_argument("--apply_chat_template", action="store_true")
parser.add_argument("--log_samples", action="store_true")
args = parser.parse_args()
model = dict(part.split("=", 1) for part in args.model_args.split(","))
sampling = dict(part.split("=", 1) for part in args.gen_kwargs.split(","))
with open(pathlib.Path(args.output_path).parents[1] / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({"task": args.tasks, **model, **sampling, "limit": args.limit}) + "\\n")
if model["model"] == "broken":
    sys.exit("the server answered 503")
out = pathlib.Path(args.output_path) / model["model"]
out.mkdir()
lines = []
if args.include_path:  # a code suite: the model's name contains its answer to every question
    rows = (pathlib.Path(args.include_path) / f"{args.tasks}.jsonl").read_text().splitlines()
    answer = model["model"].partition("-")[2]
    lines = [{"doc_id": number, "resps": [[answer]], "metrics": ["bypass"], "filter": "none"} for number in range(len(rows))]
for number in [] if args.include_path else range(int(args.limit or 10)):
    score = float(number < int(model["model"].partition("-")[2]))
    common = {"doc_id": number, "resps": [["text"]], "metrics": ["exact_match"]}
    lines += [common | {"filter": "strict", "exact_match": 0.0}, common | {"filter": "flexible", "exact_match": score}]
text = "".join(json.dumps(line) + "\\n" for line in reversed(lines))
(out / f"samples_{args.tasks}_2026-01-01T00-00-00.jsonl").write_text(text)
"""


def install_lm_eval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `python -m lm_eval` run the fake."""
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
