#!/usr/bin/env bash
# Run everything that needs a GPU, in under ten minutes. Write benchmarks/results/gpu.json.
#
#   make setup TORCH=cuda && benchmarks/gpu.sh
#   benchmarks/gpu.sh --dry-run OUT    # the same steps on a CPU with the tiny model; a test runs this
#
# SHOAL_VLLM_PYTHON=PYTHON also measures a vLLM worker. With two GPUs or more, the learner also runs on all of them.
# If a step fails or takes too long, the end of its log is recorded and the exit status is 1. If the script is stopped, the
# file holds what ran until then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
BIN=${BIN:-.venv/bin}
CONFIG=configs/quickstart.toml DEVICE=cuda RESULT=benchmarks/results/gpu.json SIZES=() RUN=()
LOGS=$(mktemp -d)
trap 'status=$?; summarize || status=1; rm -rf "$LOGS"; exit $status' EXIT
trap 'exit 1' TERM INT
if [[ ${1:-} == --dry-run ]]; then
    CONFIG=configs/tiny.toml DEVICE=cpu RESULT=$2/gpu.json RANKS=2
    SIZES=(--rows 2 --row-tokens 128 --sequences 8 --tokens 8 --repeats 1)
    RUN=(--set run.steps=1 --set evaluator.n=8 --set coordinator.prompts_per_step=2)
fi
RANKS=${RANKS:-$("$BIN/python" -c 'import torch; print(torch.cuda.device_count())')}

summarize() {
    "$BIN/python" - "$LOGS" "$RESULT" <<'PYTHON'
import json, sys
from pathlib import Path
from benchmarks.common.machine import describe, save

logs, result = map(Path, sys.argv[1:])
steps = {}
for path in sorted(logs.glob("*.step"), key=lambda path: path.stat().st_mtime):
    status, seconds = map(int, path.read_text().split())
    tail = path.with_suffix(".log").read_text().splitlines()[-20:]
    steps[path.stem] = {"status": status, "seconds": seconds} | ({"log": tail} if status else {})
files = {"parts": "parts.json", "ranks": "ranks.json", "calibration": "calibration/measured.json", "run": "run/summary.json"}
figures = {name: json.loads((logs / file).read_text()) for name, file in files.items() if (logs / file).exists()}
if calibration := figures.get("calibration"):
    calibration["judgements"] = len(calibration.pop("rows"))
if (metrics := logs / "run" / "metrics.jsonl").exists():
    by_step = [json.loads(line) for line in metrics.read_text().splitlines()]
    figures.setdefault("run", {}).update({name: [step[f"perf/{name}"] for step in by_step] for name in ("busy_s", "waiting_s")})
save(result, {"command": "benchmarks/gpu.sh", "machine": describe(), "steps": steps} | figures)
print(f"{result}: " + ", ".join(f"{name} {step['seconds']} s" for name, step in steps.items()))
sys.exit(any(step["status"] for step in steps.values()))
PYTHON
}

step() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    printf '+ %s\n' "$*"
    timeout "$limit" "$@" >"$LOGS/$name.log" 2>&1 || status=$?
    printf '%d %d\n' "$status" $((SECONDS - started)) >"$LOGS/$name.step"
    ((status == 0)) || tail -n 20 "$LOGS/$name.log"
}

measured=(--config "$CONFIG" --device "$DEVICE" "${SIZES[@]}")
step check 60 "$BIN/shoal" check "$CONFIG" --set "model.device=$DEVICE"
step proofs 60 "$BIN/python" -m pytest -q tests/toploc
step parts 180 "$BIN/python" -m benchmarks.speed.device learner worker validator "${measured[@]}" --out "$LOGS/parts.json"
((RANKS < 2)) || step ranks 120 "$BIN/python" -m torch.distributed.run --nproc-per-node "$RANKS" -m benchmarks.speed.device \
    learner "${measured[@]}" --out "$LOGS/ranks.json"
step calibrate 120 "$BIN/shoal" calibrate "$CONFIG" --set "model.device=$DEVICE" --submissions 2 --out "$LOGS/calibration"
step run 240 "$BIN/shoal" run "$CONFIG" --set "model.device=$DEVICE" "${RUN[@]}" --out "$LOGS/run"
