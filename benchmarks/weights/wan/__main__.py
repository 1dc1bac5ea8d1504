"""Measure the seconds until every client of an emulated wide-area network has verified a file from one origin.

    python -m venv PEERS && PEERS/bin/pip install shardcast==0.3.2 libtorrent==2.1.1
    python -m benchmarks.weights.wan --peers PEERS --rounds 2 --scale 0.25 [--loss 0.5] [--kill-relay --throttle-relay]

Needs root on Linux and the Debian packages gcc, iproute2, iputils-ping, nginx-light, curl, aria2, wget and b3sum. The
systems take turns, each time in fresh network namespaces (network.py) joined by an emulator (link.c). There are an origin
with 100 Mb/s, 4 relays with 1 Gb/s, 16 clients with 200 Mb/s, and a round trip of 50 ms between any two. `--scale 0.25`
uses a quarter of every rate and of the file's size, so times stay the same with less CPU. Everything that can start before
the file exists is started before. A client's time counts from the moment when the origin gets the file until the client has
verified it. Afterwards this program verifies each client's file again.

The bound is a time that no system can beat. It is the latency of two hops, plus the longer of two times: how long the origin
takes to send every byte once, and how long a client takes to receive every byte once. Frames of 1500 bytes carry 1448 bytes
of payload, so nothing over TCP takes less than 1.036 times the bound.

Writes benchmarks/results/wan-LABEL.json after every transfer: each client's seconds, errors, bytes that each node sent
and received, lost and dropped packets, the idle share of all cores, and `late`, the packets that the emulator delivered more
than 5 ms late because the CPU was busy. Files are kept in memory, which takes three times the file's size for each node.
"""

import argparse
import random
import shutil
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks.common.machine import INSIDE, RESULTS, about, save
from benchmarks.weights.wan.network import FOLDER, Network, Plan, enter
from benchmarks.weights.wan.stage import LOOK_AGAIN_S, Stage
from benchmarks.weights.wan.systems import SYSTEMS

SLOW = ("curl",)
LEAST_WATCH_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--skip-slow", action="store_true", help=f"leave out {', '.join(SLOW)}")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="Python environment with the public packages")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all rates and the file's size")
    parser.add_argument("--size", type=float, default=256, help="size of the file in MB")
    parser.add_argument("--origin", type=float, default=100, help="Mb/s in each direction, like all rates")
    parser.add_argument("--relay", type=float, default=1000)
    parser.add_argument("--client", type=float, default=200)
    parser.add_argument("--relays", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rtt", type=float, default=50, help="round-trip ms between any two nodes")
    parser.add_argument("--loss", type=float, default=0, help="percent of all packets that are lost")
    parser.add_argument("--queue", type=float, default=100, help="ms of queue before a link drops packets")
    parser.add_argument("--congestion", default="cubic", help="TCP congestion control")
    parser.add_argument("--kill-relay", action="store_true", help="kill -9 the first relay after half of the bound")
    parser.add_argument(
        "--throttle-relay", action="store_true", help="slow the second relay to a tenth after half of the bound"
    )
    parser.add_argument("--watchdog", type=float, default=40, help="give up a transfer after this many times the bound")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="default", help="results/wan-LABEL.json")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    enter(arguments.peers)

    rates = (arguments.origin, arguments.relay, arguments.client)
    plan = Plan(
        *(rate * 1e6 * arguments.scale for rate in rates),
        arguments.relays,
        arguments.clients,
        arguments.rtt,
        arguments.loss / 100,
        arguments.queue,
        arguments.congestion,
    )
    size_bytes = round(arguments.size * 1e6 * arguments.scale)
    bound_s = size_bytes * 8 / min(plan.origin_bps, plan.client_bps) + 2 * plan.rtt_ms / 2e3
    result: dict[str, Any] = about() | {"plan": asdict(plan)}
    result |= {"size_bytes": size_bytes, "bound_s": bound_s, "framing": 1500 / 1448, "transfers": []}
    path = RESULTS / f"wan-{arguments.label}.json"
    names = [name for name in arguments.systems if not (arguments.skip_slow and name in SLOW)]
    print_line(f"bound {bound_s:.2f} s, with framing {bound_s * result['framing']:.2f} s")
    for number in range(arguments.rounds):
        for name in names:
            done = transfer(name, plan, size_bytes, bound_s, number, arguments)
            result["transfers"].append({"system": name, "round": number} | done)
            save(path, result)
            print_line(row(name, done))
    for name in names:
        seconds = [done["seconds"] for done in result["transfers"] if done["system"] == name and done["seconds"]]
        if seconds:
            middle_s = statistics.median(seconds)
            print_line(f"| {name} | {middle_s:.1f} s | {middle_s / bound_s:.2f} | {len(seconds)}/{arguments.rounds} |")
    return 0 if all(done["seconds"] for done in result["transfers"]) else 1


def transfer(
    name: str, plan: Plan, size_bytes: int, bound_s: float, number: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run one system's transfer. `seconds` is None if a client did not get the file, or got a wrong one."""
    data = random.Random(arguments.seed + number).randbytes(size_bytes)
    digest = blake3(data).hexdigest()
    folder = FOLDER / "transfer"
    network = Network(plan, arguments.seed + number)
    try:
        figures: dict[str, Any] = {"rtt_ms": network.rtt_ms()}
        stage = Stage(network, folder, folder / "given", digest, arguments.scale)
        stage.file.write_bytes(data)
        SYSTEMS[name].start(stage)
        stage.wait_asking()
        before, idle_before = network.stats(), cpu()
        began_s = time.time()
        SYSTEMS[name].publish(stage)
        figures["course"] = waited(stage, began_s, bound_s, arguments)
        after, idle_after = network.stats(), cpu()
        figures |= {"cpu_idle_frac": (idle_after[0] - idle_before[0]) / (idle_after[1] - idle_before[1])}
        figures |= verdict(stage, began_s)
        figures["link"] = difference(after, before)
    except (RuntimeError, OSError) as error:
        return {"seconds": None, "errors": {"start": str(error)}}
    finally:
        network.close()
        shutil.rmtree(folder, ignore_errors=True)
    figures["origin_sent"] = figures["link"]["nodes"]["origin"]["sent_bytes"] / size_bytes
    figures["over_bound"] = figures["seconds"] and figures["seconds"] / bound_s
    return figures


def waited(stage: Stage, began_s: float, bound_s: float, arguments: argparse.Namespace) -> list[tuple[float, int, int]]:
    """Wait until every client is done or has ended, or the watchdog's time is up. Kill or slow relays meanwhile. Return
    two samples per second: the time, the bytes sent by the origin, and the bytes received by all clients together."""
    events = []
    course: list[tuple[float, int, int]] = []
    first = stage.network.stats()["nodes"]
    if arguments.kill_relay:
        events.append(lambda: stage.network.kill("relay0"))
    if arguments.throttle_relay:
        events.append(lambda: stage.network.slow("relay1", 0.1))
    clients = stage.network.clients()
    while time.time() < began_s + max(arguments.watchdog * bound_s, LEAST_WATCH_S):
        if events and time.time() >= began_s + bound_s / 2:
            events.pop(0)()
        clients = [name for name in clients if not (stage.at(name) / "done").exists()]
        if all(stage.started[name].poll() is not None for name in clients):
            break
        if time.time() - began_s > 0.5 * len(course):
            moved = difference(stage.network.stats()["nodes"], first)
            received_bytes = sum(moved[name]["received_bytes"] for name in stage.network.clients())
            course.append((round(time.time() - began_s, 2), moved["origin"]["sent_bytes"], received_bytes))
        time.sleep(LOOK_AGAIN_S)
    return course


def verdict(stage: Stage, began_s: float) -> dict[str, Any]:
    clients, errors = {}, {}
    for name in stage.network.clients():
        done, file = stage.at(name) / "done", stage.at(name) / "file"
        if not done.exists():
            errors[name] = f"not done: {stage.log(name)}"
        elif blake3(file.read_bytes()).hexdigest() != stage.digest:
            errors[name] = "not the published file"
        else:
            clients[name] = done.stat().st_mtime - began_s
    seconds = None if errors else max(clients.values())
    return {"seconds": seconds, "clients": clients, "errors": errors}


def cpu() -> tuple[int, int]:
    """Return the idle ticks of all cores, and all ticks."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    return ticks[3] + ticks[4], sum(ticks)


def difference(after: Any, before: Any) -> Any:
    if isinstance(after, dict):
        return {key: difference(after[key], before[key]) if key != "latest_ms" else after[key] for key in after}
    return round(after - before, 2)


def row(name: str, done: dict[str, Any]) -> str:
    if done["seconds"] is None:
        first = next(iter(done["errors"].items()))
        return f"{name:<11}failed at {len(done['errors'])} nodes, the first: {first}"
    clients = list(done["clients"].values())
    return (
        f"{name:<11}{done['seconds']:8.2f} s {done['over_bound']:6.2f} x bound   clients {min(clients):.2f} to "
        f"{max(clients):.2f} s, median {statistics.median(clients):.2f}   origin sent {done['origin_sent']:.2f} x file   "
        f"CPU {done['cpu_idle_frac']:.0%} idle   late {done['link']['late'] / done['link']['delivered']:.2%}"
    )


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
