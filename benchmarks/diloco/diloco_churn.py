"""Cause random faults in real processes of DiLoCo sites and their meeting. Report lost work and differing parameters.

    python -m benchmarks.diloco.diloco_churn --minutes 20 --out benchmarks/results/diloco_churn.json --figure churn.png

Every few seconds a fault of KINDS happens. Each kind comes once, in a random order, before any is repeated. Killed
processes are restarted within ten seconds. After the last fault, the run continues until all sites take part. The text is
the source of Python's standard library. The model is a random llama of two layers, so that faults, not training, take most
of the time.

`wrong` in the result must be empty. It lists a missing or repeated round, a site whose parameters differ from the meeting's
after a round (by digest), and a killed site that lost more than one round of work. The work lost is the inner steps since
the site's last round, or none if the meeting already had its offer.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.machine import about, save
from benchmarks.common.process import SHOAL, wait_until
from shoal.model.load import load_tokenizer, save_model
from shoal.model.sources import resolve

WAIT_S, INNER_STEPS, WIDTH = 6.0, 10, 64
KINDS = (
    "kill a site before it offers",
    "kill a site that has offered",
    "kill a site after the round",
    "kill a site, which loses its folder",
    "kill half of the sites",
    "stop a site",
    "kill the meeting during a round",
    "kill the meeting",
)
CONFIG = f"""[model]
name = "{{folder}}/model"
dtype = "float32"
[pretrain]
data = "{{folder}}/text.jsonl"
steps = 10000000
batch = 2
tokens = 64
lr = 1e-3
warmup_steps = 20
heldout = 2
checkpoint_every = 20
[sites]
sites = {{sites}}
inner_steps = {INNER_STEPS}
wait_s = {WAIT_S}
momentum = 0.0
lr = 1.0
"""


class Run:
    def __init__(self, folder: Path, sites: int) -> None:
        self.folder, self.sites = folder, [f"site-{i}" for i in range(sites)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.seen: dict[str, dict[int, str]] = {name: {} for name in self.sites}  # digests by round
        self.heldout: dict[int, float] = {}  # held-out loss by number of rounds; all sites have the same
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        lines = [json.dumps({"text": path.read_text(errors="replace")}) + "\n" for path in files]
        (folder / "text.jsonl").write_text("".join(lines))
        (folder / "churn.toml").write_text(CONFIG.format(folder=folder, sites=sites))
        tokenizer = load_tokenizer(resolve("bundled:tiny"))
        size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **size))
        self.parameters = sum(each.numel() for each in model.parameters())
        save_model(model, tokenizer, folder / "model")

    def start(self, name: str) -> None:
        config, folder = self.folder / "churn.toml", self.folder / name
        command = ["pool", "meet", config, "--dir", folder]
        if name != "meet":
            invite = self.folder / "meet" / "invites" / f"{name}.invite"
            wait_until(invite.exists, "invite of the meeting", self.folder / "meet.log")
            command = ["pretrain", config, "--join", invite, "--out", folder]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([*SHOAL, *command, "--threads", "1"], stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        assert self.processes[name].poll() is None, (self.folder / f"{name}.log").read_text()[-2000:]
        self.processes[name].kill()
        self.processes[name].wait()

    def rounds(self) -> list[dict[str, Any]]:
        return whole_lines(self.folder / "meet" / "rounds.jsonl")

    def offered(self) -> list[str]:
        """Return the sites that have offered in the open round, from the meeting's log."""
        log, number = (self.folder / "meet.log").read_text(errors="replace"), len(self.rounds())
        return [name for name in self.sites if f"{name} offers for round {number}\n" in log]

    def look(self, name: str) -> tuple[int, int]:
        """Record a site's digests and held-out losses. Return the number of inner steps since its last round, and the
        number of the round that they belong to."""
        since, step = 0, 0
        for each in whole_lines(self.folder / name / "metrics.jsonl"):
            step = each["step"]
            if "digest" in each and each["quorum"]:
                self.seen[name][each["round"] - 1] = each["digest"]
            since = 0 if "digest" in each else since + ("loss" in each)
            if "heldout_loss" in each and step % INNER_STEPS == 0:
                self.heldout[step // INNER_STEPS] = each["heldout_loss"]
        return since, (step - 1) // INNER_STEPS


def whole_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def at(run: Run, kind: str, site: str) -> None:
    """Wait until a fault of this kind can happen to `site`."""

    def now() -> bool:
        offered, rounds = run.offered(), run.rounds()
        if kind == "kill the meeting during a round":
            return bool(offered)
        expected = bool(rounds) and site in rounds[-1]["kept"]
        return expected and (site in offered) == (kind == "kill a site that has offered")

    if kind == "kill a site after the round":
        before = len(run.rounds())
        wait_until(lambda: any(site in each["kept"] for each in run.rounds()[before:]), f"round with {site}")
    elif "during" in kind or "offer" in kind:
        wait_until(now, f"moment to {kind}")


def fault(run: Run, kind: str, draw: random.Random, stop_s: float) -> dict[str, Any]:
    """Cause one fault, restart the processes that it hit, and return a record of it."""
    site = draw.choice(run.sites)
    at(run, kind, site)
    before = len(run.rounds())
    happened: dict[str, Any] = {"kind": kind, "round": before}
    if kind == "stop a site":
        run.processes[site].send_signal(signal.SIGSTOP)
        time.sleep(stop_s)
        run.processes[site].send_signal(signal.SIGCONT)
        return happened | {"who": [site]}
    half = draw.sample(run.sites, (len(run.sites) + 1) // 2)
    names = ["meet"] if "meeting" in kind else half if "half" in kind else [site]
    for name in names:
        run.kill(name)
    killed = {name: run.look(name) for name in names if name != "meet"}
    if "folder" in kind:
        for path in (run.folder / site).iterdir():
            if path.name != "identity.pem":  # the key stays, because the invite works only for it
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    time.sleep(draw.uniform(0, 10))
    for name in names:
        run.start(name)
    return happened | {"who": names, "killed": killed}


def verdict(run: Run, faults: list[dict[str, Any]]) -> dict[str, Any]:
    for name in run.sites:
        run.look(name)
    rounds = run.rounds()
    wrong = []
    if [each["round"] for each in rounds] != list(range(len(rounds))):
        wrong.append("a round is missing or out of order")
    for name, seen in run.seen.items():
        wrong += [f"{name} differs after round {at}" for at, result in seen.items() if result != rounds[at]["digest"]]
    killed = [(name, *at) for each in faults for name, at in each.get("killed", {}).items()]
    lost = [0 if steps == INNER_STEPS and name in rounds[at]["kept"] else steps for name, steps, at in killed]
    wrong += [f"{steps} inner steps of a site are lost" for steps in lost if steps > INNER_STEPS]
    losses = [
        [figures["loss"] for figures in each["figures"].values() if figures["loss"] is not None] for each in rounds
    ]
    return {
        "wrong": wrong,
        "rounds": len(rounds),
        "rounds_with_all_sites": sum(len(each["kept"]) == len(run.sites) for each in rounds),
        "longest_round_s": max(each["open_s"] for each in rounds),
        "healed": sum(len(each["healed"]) for each in rounds),
        "missing": sum(len(each["missing"]) for each in rounds),
        "left_out": sum(len(each["left_out"]) for each in rounds),
        "digests_compared": sum(map(len, run.seen.values())),
        "killed_sites": len(lost),
        "most_lost_steps_of_a_site": max(lost, default=0),
        "unfinished_shares": rounds[-1]["unfinished_shares"],
        "heldout_loss_by_round": dict(sorted(run.heldout.items())),
        "kept_by_round": [len(each["kept"]) for each in rounds],
        "loss_by_round": [round(statistics.fmean(each), 4) if each else None for each in losses],
    }


def picture(result: dict[str, Any], sites: int, path: Path) -> None:
    """Plot loss, faults by kind and the number of sites, over rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1))
    above.plot(result["loss_by_round"], color="#bbbbbb", linewidth=0.6, label="training, mean of the sites")
    heldout = {int(round): loss for round, loss in result["heldout_loss_by_round"].items()}
    above.plot(*zip(*heldout.items(), strict=True), color="#4477aa", linewidth=1.5, label="held out, after the round")
    above.set_ylabel("loss, nats per token")
    above.legend(frameon=False, fontsize=8, loc="upper right")
    for row, kind in enumerate(KINDS):
        rounds = [each["round"] for each in result["faults"] if each["kind"] == kind]
        middle.plot(rounds, [row] * len(rounds), "v", color="#cc3311", markersize=5)
    middle.set_yticks(range(len(KINDS)), KINDS, fontsize=8)
    middle.set_ylim(len(KINDS) - 0.5, -0.5)
    middle.grid(axis="y", color="#eeeeee")
    below.plot(result["kept_by_round"], drawstyle="steps-mid", color="#4477aa", linewidth=0.8)
    below.set(xlabel="round (outer step)", ylabel="sites that\ncounted", ylim=(0, sites + 0.5))
    figure.savefig(path)


def churn(run: Run, minutes: float, every_s: float, stop_s: float, seed: int) -> dict[str, Any]:
    draw, faults, kinds = random.Random(seed), list[dict[str, Any]](), list[str]()
    for name in ("meet", *run.sites):
        run.start(name)
    wait_until(lambda: len(run.rounds()) >= 2, "second round")
    start_s = time.monotonic()
    while (elapsed_s := time.monotonic() - start_s) < 60 * minutes:
        time.sleep(draw.expovariate(1 / every_s))
        kinds = kinds or draw.sample(KINDS, len(KINDS))
        faults.append(fault(run, kinds.pop(), draw, stop_s))
    before = len(run.rounds())
    whole = len(run.sites)
    wait_until(lambda: any(len(each["kept"]) == whole for each in run.rounds()[before:]), "round with all sites")
    return {"churned_s": round(elapsed_s), "faults": faults} | verdict(run, faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--every", type=float, default=10.0, help="mean seconds from a fault's end to the next")
    parser.add_argument("--stop", type=float, default=60.0, help="seconds for which a site is stopped (SIGSTOP)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, required=True, help="file of the result; with --draw, the existing file to plot"
    )
    parser.add_argument("--figure", type=Path, help="PNG file to plot the run into")
    parser.add_argument("--draw", action="store_true", help="only draw the figure")
    arguments = parser.parse_args()
    if arguments.draw:
        record = json.loads(arguments.out.read_text())
        picture(record, record["sites"], arguments.figure)
        return
    record = about()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), arguments.sites)
        record |= {"sites": arguments.sites, "parameters": run.parameters, "inner_steps": INNER_STEPS, "wait_s": WAIT_S}
        try:
            result = churn(run, arguments.minutes, arguments.every, arguments.stop, arguments.seed)
        finally:
            for process in run.processes.values():
                process.kill()
                process.wait()
    save(arguments.out, record | result | {"load": os.getloadavg()})
    if arguments.figure:
        picture(result, arguments.sites, arguments.figure)
    print(json.dumps({key: value for key, value in result.items() if not key.endswith("_by_round")}))  # noqa: T201
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
