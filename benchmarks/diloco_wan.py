"""Share of the time that two sites compute, over an emulated wide-area network: DiLoCo, streaming, and data-parallel.

    python benchmarks/diloco_wan.py --inner-steps 100 --rounds 4 --out benchmarks/results/diloco_wan.json

Two sites and the meeting in network namespaces of their own, 100 Mb/s each way and a round trip of 50 ms between any two
(`wan/network.py`); real processes, `shoal meet` and `shoal pretrain --join`, one thread each. The model is `bundled:tiny`'s
architecture with new weights. `streaming`: four fragments, results applied a tenth of a fragment's interval later. `dense`:
the same model, batch and threads, where gloo averages float32 gradients after every step over the same links.

`compute` is what the processes measured themselves, from the end of the first round to the end of the last. `peak_Mbps` is
the most that the meeting's machine received in one second. Needs root on Linux, gcc and iproute2.
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from wan.network import FOLDER, INSIDE, Network, Plan, enter

PLAN = Plan(100e6, 0.0, 100e6, 0, 2, 50.0, 0.0, 100.0, "cubic")
NODES = {"meet": "origin", "site-0": "client0", "site-1": "client1"}
LONGEST_S = 1200.0
TOKENS, BATCH = 128, 16
MODES: dict[str, dict[str, Any]] = {
    "plain": {"fragments": 1, "delay": 0, "keep": 0.0},
    "streaming": {"fragments": 4, "delay": "tenth", "keep": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner-steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dense-steps", type=int, default=20)
    parser.add_argument("--modes", nargs="+", default=["plain", "streaming", "dense"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dense-node", nargs=2, help=argparse.SUPPRESS)  # rank, and where rank 0 is
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dense_node:
        dense_node(int(arguments.dense_node[0]), arguments.dense_node[1], arguments.dense_steps, arguments.out)
        return
    enter(Path("peers"))
    from machine import describe

    command = " ".join(["python", *sys.argv]).removesuffix(f" {INSIDE}")
    held: dict[str, Any] = {"command": command, "machine": describe(), "load_before": os.getloadavg(), "runs": []}
    held |= {"tokens_per_step_and_site": TOKENS * BATCH, "inner_steps": arguments.inner_steps}
    for mode in arguments.modes:
        found = dense(arguments) if mode == "dense" else sites(mode, arguments)
        held["runs"].append({"mode": mode} | found)
        arguments.out.write_text(json.dumps(held, indent=1) + "\n")
        print(mode, json.dumps(found["summary"]), flush=True)  # noqa: T201


def sites(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    folder = FOLDER / mode
    folder.mkdir()
    config = write_config(folder, mode, arguments)
    network = Network(PLAN, 0)
    try:
        shoal = [sys.executable, "-m", "shoal"]
        url = f"http://{network.address('origin')}:7000"
        meet = [*shoal, "meet", config, "--dir", folder / "meet", "--threads", "1", "--set", f"sites.url={url}"]
        started = [network.start("origin", meet, folder / "meet.log")]
        invites = [folder / "meet" / "invites" / f"site-{i}.invite" for i in range(2)]
        wait(lambda: all(path.exists() for path in invites), folder)
        for i, invite in enumerate(invites):
            join = [*shoal, "pretrain", config, "--join", invite, "--out", folder / f"site-{i}", "--threads", "1"]
            started.append(network.start(f"client{i}", join, folder / f"site-{i}.log"))
        course = watch(network, lambda: all(each.poll() is not None for each in started[1:]))
        found = [rounds(folder / f"site-{i}" / "metrics.jsonl") for i in range(2)]
    finally:
        network.close()
    computes = [share(each[0], each[-1]) for each in found]
    summary = {
        "compute": computes,
        "sent_bytes_per_site": found[0][-1]["sent_bytes"],
        "seconds_per_round": (found[0][-1]["elapsed_s"] - found[0][0]["elapsed_s"]) / (len(found[0]) - 1),
        "waited_s_per_round": (found[0][-1]["waited_s"] - found[0][0]["waited_s"]) / (len(found[0]) - 1),
        "peak_Mbps": 8e-6 * max(after - before for before, after in zip(course, course[1:], strict=False)),
    }
    return {"summary": summary, "rounds": found}


def share(first: dict[str, Any], last: dict[str, Any]) -> float:
    return float((last["computed_s"] - first["computed_s"]) / (last["elapsed_s"] - first["elapsed_s"]))


def rounds(path: Path) -> list[dict[str, Any]]:
    return [each for each in map(json.loads, path.read_text().splitlines()) if "waited_s" in each]


def watch(network: Network, done: Any) -> list[int]:
    """What the meeting's machine had received, once a second, until `done`."""
    course, deadline_s = [0], time.monotonic() + LONGEST_S
    while not done():
        if time.monotonic() > deadline_s:
            raise SystemExit("the sites did not finish in time")
        time.sleep(1.0)
        course.append(network.stats()["nodes"]["origin"]["received_bytes"])
    return course


def wait(true: Any, folder: Path) -> None:
    deadline_s = time.monotonic() + 120
    while not true():
        if time.monotonic() > deadline_s:
            raise SystemExit((folder / "meet.log").read_text())
        time.sleep(0.1)


def write_config(folder: Path, mode: str, arguments: argparse.Namespace) -> Path:
    text = [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in text))
    settings = dict(MODES[mode])
    if settings["delay"] == "tenth":
        settings["delay"] = max(1, arguments.inner_steps // settings["fragments"] // 10)
    steps = arguments.inner_steps * arguments.rounds
    config = folder / "wan.toml"
    config.write_text(
        "[model]\nname = 'bundled:tiny'\ndtype = 'float32'\n"
        f"[pretrain]\ndata = '{folder}/text.jsonl'\nsteps = {steps}\nbatch = {BATCH}\nmicro_batch = {BATCH}\n"
        f"tokens = {TOKENS}\nlr = 1e-3\nwarmup_steps = 20\nheldout = 2\nshare = 8\neval_every = {steps}\n"
        f"checkpoint_every = {steps}\n[sites]\nsites = 2\ninner_steps = {arguments.inner_steps}\nwait_s = 300\n"
        "host = '0.0.0.0'\nport = 7000\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())
    )
    return config


def dense(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = FOLDER / "dense"
    folder.mkdir()
    network = Network(PLAN, 0)
    try:
        started = []
        for rank in range(2):
            node = [sys.executable, __file__, "--dense-node", str(rank), network.address("client0")]
            node += ["--dense-steps", str(arguments.dense_steps), "--out", folder / f"{rank}.json"]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "wan0", "OMP_NUM_THREADS": "1"}
            started.append(network.start(f"client{rank}", node, folder / f"{rank}.log", env=environment))
        watch(network, lambda: all(each.poll() is not None for each in started))
        if not all((folder / f"{rank}.json").exists() for rank in range(2)):
            raise SystemExit((folder / "0.log").read_text()[-2000:])
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    finally:
        network.close()
    computes = [sum(each["compute_s"]) / sum(each["compute_s"] + each["reduce_s"]) for each in found]
    return {"summary": {"compute": computes, "parameters": found[0]["parameters"]}, "nodes": found}


def dense_node(rank: int, leader: str, steps: int, out: Path) -> None:
    """One device of data-parallel training: AdamW steps on random tokens, gradients averaged by gloo after each."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from shoal.model.plain import plain_model
    from shoal.model.sources import resolve

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{leader}:29500", rank=rank, world_size=2)
    model = plain_model(resolve("bundled:tiny"), 0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    vocabulary = model.config.vocab_size
    held: dict[str, Any] = {"compute_s": [], "reduce_s": [], "parameters": sum(p.numel() for p in model.parameters())}
    for _ in range(steps):
        began_s = time.monotonic()
        ids_BT = torch.randint(vocabulary, (BATCH, TOKENS))
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten()).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        computed_s = time.monotonic()
        dist.all_reduce(flat)
        reduced_s = time.monotonic()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        held["compute_s"].append(computed_s - began_s + time.monotonic() - reduced_s)
        held["reduce_s"].append(reduced_s - computed_s)
    dist.destroy_process_group()
    out.write_text(json.dumps(held))


if __name__ == "__main__":
    main()
