"""Measure for what share of the time two DiLoCo sites compute, over an emulated wide-area network.

    python -m benchmarks.diloco.diloco_wan --repeats 2 --out benchmarks/results/diloco_wan.json

Two sites and the meeting each have a network namespace, with 100 Mb/s each way and a round trip of 50 ms between any two
(`weights/wan/network.py`). All are real processes with one thread each: `shoal pool meet` and `shoal pretrain --join`. The
model is a small llama with new weights. The text is Python's standard library. The raw file also has figures for
data-parallel training. They come from an earlier commit, because the package no longer has such training.

`compute` is `computed_s` / `elapsed_s` in the sites' metrics.jsonl after the first round. Encoding and the outer step do not
count as computing.
`busiest_Mbps` is the maximum rate of the meeting's link in one direction over a second, with IP headers.
`late` in `stats` counts packets that the emulator delivered more than 5 ms late because the CPU was busy.
Needs root on Linux, gcc and iproute2.
"""

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.machine import INSIDE, about, save
from benchmarks.common.process import SHOAL, wait_until
from benchmarks.weights.wan.network import FOLDER, Network, Plan, enter

PLAN = Plan(100e6, 0.0, 100e6, 0, 2, 50.0, 0.0, 100.0, "cubic")
LONGEST_S, LOOK_S = 300.0, 0.1
TOKENS, BATCH, MICRO_BATCH = 256, 24, 24
WIDTH, LAYERS = 128, 4
SETTINGS: dict[str, dict[str, Any]] = {  # the sites' settings and the number of steps
    "H = 50": {"inner_steps": 50, "steps": 150},
    "H = 10": {"inner_steps": 10, "steps": 50},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    enter(Path("peers"))

    record: dict[str, Any] = about() | {"load_before": os.getloadavg()}
    record |= {"tokens_per_step_and_site": TOKENS * BATCH, "parameters": write_model(), "runs": []}
    for repeat in range(arguments.repeats):
        for name in arguments.settings:
            result = sites(FOLDER / f"{name}-{repeat}", dict(SETTINGS[name]))
            record["runs"].append({"name": name, "settings": SETTINGS[name], "repeat": repeat} | result)
            save(arguments.out, record)
            print(name, json.dumps(result["summary"]), flush=True)  # noqa: T201


def sites(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = write_config(folder, settings)
    network = Network(PLAN, 0)
    try:
        meet = [*SHOAL, "pool", "meet", config, "--dir", folder / "meet", "--threads", "1"]
        meet += ["--set", f"sites.url=http://{network.address('origin')}:7000"]
        started = [network.start("origin", meet, folder / "meet.log")]
        invites = [folder / "meet" / "invites" / f"site-{i}.invite" for i in range(2)]
        wait_until(lambda: all(path.exists() for path in invites), "invites", folder / "meet.log", within_s=60.0)
        for i, invite in enumerate(invites):
            join = [*SHOAL, "pretrain", config, "--join", invite, "--out", folder / f"site-{i}", "--threads", "1"]
            started.append(network.start(f"client{i}", join, folder / f"site-{i}.log"))
        course = watch(network, "origin", lambda: all(each.poll() is not None for each in started[1:]), folder)
        stats = network.stats()
    finally:
        network.close()
    lines = [metrics(folder / f"site-{i}") for i in range(2)]
    rounds = [[line for line in each if "round" in line] for each in lines]
    return {
        "summary": {
            "compute": [share(each[0], each[-1]) for each in rounds],
            "step_s": [step_s(each) for each in lines],
            "waited_s_per_round": [per(each[0], each[-1], "waited_s", "round") for each in rounds],
            "other_s_per_round": [other_s(each[0], each[-1]) for each in rounds],
            "busiest_Mbps": busiest(course),
            "sent_bytes_per_step": [per(each[0], each[-1], "sent_bytes", "step") for each in rounds],
        },
        "stats": stats,
        "rounds": rounds,
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def per(first: dict[str, Any], last: dict[str, Any], name: str, count: str) -> float:
    return float((last[name] - first[name]) / (last[count] - first[count]))


def share(first: dict[str, Any], last: dict[str, Any]) -> float:
    return per(first, last, "computed_s", "elapsed_s")


def other_s(first: dict[str, Any], last: dict[str, Any]) -> float:
    """Return the seconds per round spent on encoding, decoding, the outer step and files."""
    elapsed, computed, waited = (per(first, last, name, "round") for name in ("elapsed_s", "computed_s", "waited_s"))
    return elapsed - computed - waited


def step_s(lines: list[dict[str, Any]]) -> float:
    return statistics.median(line["tokens"] / line["tokens_per_s"] for line in lines if "tokens_per_s" in line)


def watch(network: Network, node: str, done: Callable[[], bool], folder: Path) -> list[tuple[float, int, int]]:
    """Record (seconds, bytes received, bytes sent) of `node` until `done` returns true."""
    course, began_s = [], time.monotonic()
    while not done():
        if time.monotonic() - began_s > LONGEST_S:
            raise SystemExit(
                f"not done after {LONGEST_S:g} s: " + "".join(path.read_text()[-800:] for path in folder.glob("*.log"))
            )
        counted = network.stats()["nodes"][node]
        course.append((round(time.monotonic() - began_s, 3), counted["received_bytes"], counted["sent_bytes"]))
        time.sleep(LOOK_S)
    return course


def busiest(course: list[tuple[float, int, int]]) -> float:
    """Return the maximum rate in one direction over a second, in Mb/s."""
    most, first = 0.0, 0
    for at_s, *counted in course:
        while at_s - course[first][0] > 1.0:
            first += 1
        most = max(most, *(now - then for now, then in zip(counted, course[first][1:], strict=True)))
    return 8e-6 * most


def write_model() -> int:
    """Write a llama's config and the tokenizer of `bundled:tiny` into a folder. Return the number of parameters."""
    from transformers import LlamaConfig

    from shoal.model.load import load_model, load_tokenizer
    from shoal.model.sources import resolve

    tokenizer = load_tokenizer(resolve("bundled:tiny"))
    tokenizer.save_pretrained(FOLDER / "model")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=11 * WIDTH // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    ).save_pretrained(FOLDER / "model")
    return sum(parameter.numel() for parameter in load_model(FOLDER / "model", seed=0).parameters())


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir()
    text = [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in text))
    steps = settings.pop("steps")
    config = folder / "wan.toml"
    config.write_text(
        f"[model]\nname = '{FOLDER}/model'\ndtype = 'float32'\n"
        f"[pretrain]\ndata = '{folder}/text.jsonl'\nsteps = {steps}\nbatch = {BATCH}\nmicro_batch = {MICRO_BATCH}\n"
        f"tokens = {TOKENS}\nlr = 1e-3\nwarmup_steps = 20\nheldout = 0\nshare = 8\ncheckpoint_every = {steps}\n"
        "[sites]\nsites = 2\nwait_s = 120\nhost = '0.0.0.0'\nport = 7000\n"
        + "".join(f"{key} = {value}\n" for key, value in settings.items())
    )
    return config


if __name__ == "__main__":
    main()
