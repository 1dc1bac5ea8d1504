"""Does `shoal audit` find every forgery of a run, and pass every honest run?

    python -m benchmarks.trust.forgeries                     # everything, about 25 minutes on two cores
    python -m benchmarks.trust.forgeries --only folder coordinator --keep DIR

Each run is a real `shoal run` of a short configs/tiny.toml. The parts:

    folder       somebody without keys deletes, adds or changes files of a finished run
    coordinator  a coordinator changes ledger and tables, signs and seals them again, and has its validators' key
    liars        runs whose learner or validator lies from the start (`evil/sitecustomize.py`)
    honest       ten honest runs: other seeds and recipes, LoRA, bf16, stakes, killed, resumed. Six of them are audited
                 as on another kind of CPU (ATEN_CPU_CAPABILITY)

A forgery is found if the exit status is 1, or 5 (something that matters was not compared) if it only deletes the evidence.
An honest run must give 0. Writes benchmarks/results/forgeries.json.
"""

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.machine import RESULTS, ROOT, about, save
from benchmarks.trust.forging import Body, Ledger, forging
from shoal.cli import main as shoal
from shoal.cli.arguments import say
from shoal.cli.audit.commands import NOT_COMPARED
from shoal.learner.report import DOMAIN
from shoal.protocol.identity import Identity, Signed

BROKEN = 1
CONFIG = ROOT / "configs" / "tiny.toml"
SHORT = {
    "run.steps": "2",
    "coordinator.prompts_per_step": "8",
    "workers.groups_per_submission": "4",
    "learner.checkpoint_every": "1",
    "evaluator.n": "16",
}
RUN_S, POLL_S = 300.0, 0.2
QUICK = ("--rerun", "0", "--proofs", "0")
WHOLE = ("--rerun", "1", "--proofs", "1000")
LIARS = (
    "learner scales",
    "learner does not train",
    "learner trains half",
    "learner trains less",
    "validator rewards",
    "validator prompts",
    "validator logprobs",
)
Change = Callable[[Path], None]
Lie = Callable[[Ledger], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["folder", "coordinator", "liars", "honest"])
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=RESULTS / "forgeries.json")
    arguments = parser.parse_args()
    started_s, results = time.monotonic(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.keep or Path(temporary)).resolve()
        parts = {"folder": in_folder, "coordinator": by_coordinator, "liars": by_liars, "honest": honest}
        for part in arguments.only:
            results[part] = {}
            for name, right, line in parts[part](work):
                results[part][name] = {"right": right, "line": line}
                say(f"{'ok  ' if right else 'MISS'} {part}: {name}: {line}")
    wrong = {part: [name for name, each in named.items() if not each["right"]] for part, named in results.items()}
    counts = {part: {"runs": len(named), "right": len(named) - len(wrong[part])} for part, named in results.items()}
    minutes = round((time.monotonic() - started_s) / 60, 1)
    save(arguments.out, {**about(), "minutes": minutes, "counts": counts, "wrong": wrong, "results": results})
    return int(any(wrong.values()))


# --- runs and audits -------------------------------------------------------------------------------------------------


def start(folder: Path, *arguments: str, evil: str = "", **changed: str) -> subprocess.Popen[bytes]:
    """Start a short `shoal run` with these changed settings, whose names have "__" for a dot."""
    settings = SHORT | {name.replace("__", "."): value for name, value in changed.items()}
    argv = [sys.executable, "-m", "shoal", "run", *(arguments or [str(CONFIG), "--out", str(folder)]), "--no-dashboard"]
    argv += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "benchmarks" / "trust" / "evil"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ({"EVIL": evil, "PYTHONPATH": path} if evil else {})
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True)


def finished(folder: Path, *arguments: str, evil: str = "", **changed: str) -> Path:
    """Return the folder of a finished run, which is made if it does not exist."""
    if not (folder / "summary.json").is_file() or arguments:
        with start(folder, *arguments, evil=evil, **changed) as run:
            if run.wait(RUN_S):
                raise RuntimeError(f"the run failed: see {folder.parent / folder.name}.log")
    return folder


def wait_for_steps(folder: Path, steps: int) -> None:
    deadline_s = time.monotonic() + RUN_S
    while len(list(folder.glob("learner/checkpoints/step-*"))) < steps:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{folder} has not trained {steps} steps")
        time.sleep(POLL_S)


def audit(folder: Path, *arguments: str, capability: str = "") -> tuple[int, str]:
    """Return the exit status and the line that says what is broken, or else what was found."""
    argv = ["audit", str(folder), "--seed", "0", *arguments]
    if capability:  # torch reads the variable when it starts
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-m", "shoal", *argv]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        status, printed = done.returncode, done.stdout + done.stderr
    else:
        with io.StringIO() as out, redirect_stdout(out):
            status, printed = shoal(argv), out.getvalue()
    lines = printed.splitlines() or ["nothing was printed"]
    needed = [line for line in lines if line.startswith(("BROKEN", "NOT COMPARED"))]
    return status, (needed or lines)[-1][:200]


def forged(base: Path, work: Path, change: Change, *arguments: str) -> tuple[int, str]:
    folder = work / "forged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    change(folder)
    return audit(folder, *arguments)


# --- without keys ----------------------------------------------------------------------------------------------------


def remove(*patterns: str) -> Change:
    def change(run: Path) -> None:
        for pattern in patterns:
            for path in sorted(run.glob(pattern))[-1:]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def write(name: str, text: str, *gone: str) -> Change:
    def change(run: Path) -> None:
        remove(*gone)(run)
        for folder in (run / "model", run / "learner" / "model"):
            if folder.is_dir():
                (folder / name).write_text(text)

    return change


def zeros(*gone: str) -> Change:
    def change(run: Path) -> None:
        remove(*gone)(run)
        path = run / "model" / "model.safetensors"
        save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)

    return change


def adapter(run: Path) -> None:
    (run / "model" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    save_file({"base_model.model.w.lora_A.weight": torch.ones(1)}, run / "model" / "adapter_model.safetensors")


def without_tables(run: Path) -> None:
    audit(run, "--export", str(run / "x.jsonl"))
    remove("coordinator/pool.sqlite", "metrics.jsonl")(run)


BOTH = ("learner", "origin")
FOLDER: dict[str, Change] = {
    "weights 0, learner and origin deleted": zeros(*BOTH),
    "weights 0, learner deleted": zeros("learner"),
    "weights 0": zeros(),
    "another template, origin deleted": write("chat_template.jinja", "lie", "origin"),
    "another config, learner and origin deleted": write("config.json", "lie", *BOTH),
    "another tokenizer, origin deleted": write("tokenizer.json", "{}", "origin"),
    "an adapter beside the model": adapter,
    "code beside the model": write("modeling_own.py", "import os"),
    "tokens beside the model, learner and origin deleted": write("added_tokens.json", "{}", *BOTH),
    "a hidden file in the model": write(".own", "lie"),
    "a file less in the model, origin deleted": remove("model/config.json", "origin"),
    "no model": remove("model", "learner/model"),
    "no accepted file": remove("coordinator/store/accepted/*"),
    "no submission": remove("coordinator/store/submissions/*"),
    "no store": remove("coordinator/store"),
    "no tasks": remove("coordinator/tasks"),
    "no task file": remove("coordinator/tasks/" + "[0-9a-f]" * 64),
    "no checkpoint": remove("learner/checkpoints/step-*"),
    "no shard": remove("origin/store/v*/*/*.shard"),
    "no manifest": remove("origin/store/v*/manifest.json"),
    "no metrics": remove("metrics.jsonl"),
    "no config": remove("config.toml"),
    "no tables, with an export": without_tables,
}


def in_folder(work: Path) -> Iterator[tuple[str, bool, str]]:
    base = finished(work / "base")
    for name, change in FOLDER.items():
        more = ("--ledger", str(work / "forged" / "x.jsonl")) if change is without_tables else ()
        status, line = forged(base, work, change, *QUICK, *more)
        yield name, status == BROKEN or (bool(more) and status == NOT_COMPARED), line


# --- the coordinator -------------------------------------------------------------------------------------------------


def other_worker(run: Ledger, key: object) -> str:
    keys = [str(body["key"]) for kind, body in run.entries if kind == "registered" and body["role"] == "worker"]
    return next(each for each in keys if each != key)


def last(run: Ledger, kind: str) -> Body:
    return [body for each, body in run.entries if each == kind][-1]


def pay_another(run: Ledger) -> None:
    body = run.find("credited")
    body["worker"] = other_worker(run, body["worker"])


def slash_honest(run: Ledger) -> None:
    body = run.find("accepted")
    facts = {name: value for name, value in body.items() if name not in ("tokens", "accepted")} | {"reason": "proof"}
    run.change_kind("rejected", body)
    body.update(facts | {"detail": ""})
    run.add("slashed", facts, after=body)


def count_more(run: Ledger) -> None:
    body = run.find("accepted")
    body["tokens"] += 1
    credit = next(
        each for kind, each in run.entries if kind == "credited" and body["submission"] in each["submissions"]
    )
    credit["tokens"] += 1


def sign_record(run: Ledger, **changed: object) -> None:
    """Let the learner sign another record of the last step, as a learner in league with the coordinator would."""
    learner, body = Identity.load(run.folder / "learner" / "identity.pem"), last(run, "trained")
    record = json.loads(Signed.model_validate_json(body["record"]).open(learner.public, domain=DOMAIN))
    body["record"] = Signed.make(learner, json.dumps(record | changed), domain=DOMAIN).model_dump_json()


def train_fewer(run: Ledger) -> None:
    learner = Identity.load(run.folder / "learner" / "identity.pem")
    record = Signed.model_validate_json(last(run, "trained")["record"]).open(learner.public, domain=DOMAIN)
    sign_record(run, groups=json.loads(record)["groups"][:-1])


def withdraw(run: Ledger, stake: int, unstake: int, amount: int) -> None:
    key = run.find("accepted")["worker"]
    for kind, each in (("staked", stake), ("unstaked", unstake), ("withdrawn", amount)):
        if each:
            run.add(kind, {"key": key, "amount": each})


def history(run: Ledger) -> None:
    run.database.execute("UPDATE history SET body = replace(body, 'reward', 'rewarD') WHERE kind = 'step'")


def node(run: Ledger, **columns: object) -> None:
    for name, value in columns.items():
        run.database.execute(f"UPDATE nodes SET {name} = ? WHERE key = ?", [value, other_worker(run, None)])


COORDINATOR: dict[str, Lie] = {
    "pay more": lambda run: run.find("credited").update(tokens=run.find("credited")["tokens"] + 1),
    "count and pay more": count_more,
    "pay nobody": lambda run: run.drop(*[body for kind, body in run.entries if kind == "credited"]),
    "pay twice": lambda run: run.add("credited", dict(run.find("credited"))),
    "pay another": pay_another,
    "pay for nothing": lambda run: run.add("credited", run.find("credited") | {"submissions": [], "tokens": 0}),
    "forfeit": lambda run: run.change_kind("forfeited", run.find("credited")),
    "slash honest work": slash_honest,
    "ban": lambda run: node(run, state="banned"),
    "dismiss": lambda run: node(run, state="dismissed"),
    "suspend": lambda run: node(run, state="suspended", suspensions=1, suspended_until_s=2e9),
    "judged by a worker": lambda run: run.find("accepted").update(validator=run.find("accepted")["worker"]),
    "judged by nobody": lambda run: run.find("accepted").update(validator="ee" * 32),
    "another nonce": lambda run: run.find("accepted").update(nonce="0" * 32),
    "another file": lambda run: run.find("accepted").update(accepted=last(run, "accepted")["accepted"]),
    "a group twice": lambda run: run.find("batch")["groups"].__setitem__(0, run.find("batch")["groups"][1]),
    "a group of nobody": lambda run: run.find("batch")["groups"].__setitem__(0, ["ab" * 8 + "-000099", 0]),
    "groups in another order": lambda run: run.find("batch")["groups"].reverse(),
    "another version": lambda run: last(run, "policy").update(digest="ab" * 32),
    "a version less": lambda run: run.drop(last(run, "policy")),
    "a step less": lambda run: run.drop(last(run, "trained")),
    "a step by a worker": lambda run: last(run, "trained").update(record="{}"),
    "a step from other weights": lambda run: sign_record(run, before="ab" * 32),
    "a step to other weights": lambda run: sign_record(run, after="ab" * 32),
    "a step on fewer groups": train_fewer,
    "withdraw without stake": lambda run: withdraw(run, 0, 0, 5),
    "withdraw before the time": lambda run: withdraw(run, 7, 7, 7),
    "unstake too much": lambda run: withdraw(run, 7, 8, 0),
    "stake less than nothing": lambda run: withdraw(run, -7, 0, 0),
    "reclaim without deposit": lambda run: run.add("reclaimed", {"key": "ab" * 32, "amount": 5}),
    "reclaim too much": lambda run: [run.add(kind, {"key": "ab" * 32, "amount": each}) for kind, each in BOOKED],  # type: ignore[func-returns-value]
    "another config": lambda run: run.find("started").update(
        config=run.find("started")["config"].replace("group_size = 16", "group_size = 8")
    ),
    "another history": history,
    "an unknown kind": lambda run: run.add("pardoned", {}),
    "no seal": lambda run: run.drop(last(run, "sealed")),
}
BOOKED = (("deposited", 5), ("reclaimed", 6))


def by_coordinator(work: Path) -> Iterator[tuple[str, bool, str]]:
    base = finished(work / "base")
    coordinator, validator = (Identity.load(base / name / "identity.pem") for name in ("coordinator", "validator"))

    def written(lie: Lie, key: Identity | None) -> Change:
        def change(run: Path) -> None:
            with forging(run, coordinator, key) as ledger:
                lie(ledger)

        return change

    status, line = forged(base, work, written(lambda run: None, validator), *QUICK)
    yield "nothing is changed", status == 0, line
    for name, lie in COORDINATOR.items():
        status, line = forged(base, work, written(lie, validator), *QUICK)
        yield name, status == BROKEN or (name == "a version less" and status == NOT_COMPARED), line
    status, line = forged(base, work, written(lambda run: run.drop(run.find("credited")), None), *QUICK)
    yield "without the validators' key", status == BROKEN, line


# --- runs that lie, and honest runs ----------------------------------------------------------------------------------


def by_liars(work: Path) -> Iterator[tuple[str, bool, str]]:
    for lie in LIARS:
        run = finished(work / lie.replace(" ", "-"), evil=lie)
        status, line = audit(run, *WHOLE)
        yield lie, status == BROKEN, line


def honest(work: Path) -> Iterator[tuple[str, bool, str]]:
    recipes: dict[str, dict[str, str]] = {
        "seed 1": {"run__seed": "1"},
        "LoRA": {"learner__lora__rank": "4"},
        "bf16": {"model__dtype": "bfloat16"},
        "another recipe": {"learner__loss__kind": "gspo", "coordinator__async_level": "1", "learner__lr": "3e-7"},
        "two updates in a step": {"learner__optimizer_steps_per_step": "2", "run__seed": "2"},
        "four workers": {"workers__count": "4"},
    }
    for number, (name, changed) in enumerate(recipes.items()):
        run = finished(work / f"honest-{number}", **changed)
        status, line = audit(run, *WHOLE, capability=("default", "avx2", "default", "default")[number % 4])
        yield name, status == 0, line
    for name in ("killed", "resumed", "trained more", "stakes"):
        folder = work / f"honest-{name.replace(' ', '-')}"
        if name == "trained more":
            finished(folder)
            finished(folder, "--resume", str(folder), run__steps="3")
        elif not folder.exists():
            interrupt(folder, name)
        status, line = audit(folder, *WHOLE, *(["--unsealed"] if name == "killed" else []))
        yield name, status == 0, line


def interrupt(folder: Path, what: str) -> None:
    """Kill a run after its first step and, except for "killed", resume it; for "stakes", book stakes first."""
    steps = "8" if what == "stakes" else "4"
    with start(folder, run__steps=steps) as run:
        wait_for_steps(folder, 1)
        if what == "stakes":
            key = Identity.load(folder / "worker-0" / "identity.pem").public
            for booking, amount in (("stake", "7"), ("unstake", "3")):
                if shoal(["pool", "stake", "book", str(folder / "coordinator"), booking, key, amount]):
                    raise RuntimeError(f"the {booking} was not booked")
        os.killpg(run.pid, signal.SIGINT if what == "stakes" else signal.SIGKILL)
        run.wait(RUN_S)
    if what != "killed":
        finished(folder, "--resume", str(folder), run__steps=steps)


if __name__ == "__main__":
    sys.exit(main())
