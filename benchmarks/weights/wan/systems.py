"""The systems that this benchmark compares, by name. Each has the best settings found for it."""

import json
import shutil
import sys

from .network import FOLDER, HERE
from .nginx import Star, Tree
from .stage import Stage, System

SHOAL = {  # {relays} and {upstream} are comma-separated URLs
    "origin": "origin published --store store --listen {address}:8000",
    "relay": "relay --upstream {upstream} --key {key} --store store --listen {address}:8000",
    "fetch": "fetch {relays} --key {key} --out out --wait 600 | (read path && mv $path/given file && touch done)",
}
PEERS_PYTHON = FOLDER / "peers" / "bin" / "python"


class Shoal:
    """This project's SHARDCAST with default settings. The origin watches an empty folder. Relays have the origin and each
    other as upstreams, and clients use all relays. `shoal fetch` prints a path once it has verified the version."""

    def start(self, stage: Stage) -> None:
        relays = stage.network.relays()
        urls = {name: f"http://{stage.address(name)}:8000" for name in ["origin", *relays]}
        (stage.at("origin") / "published").mkdir()
        self.run(stage, "origin", "origin")
        key = self.announced(stage, "origin")["key"]
        for name in relays:
            upstream = ",".join(url for other, url in urls.items() if other != name)
            self.run(stage, name, "relay", upstream=upstream, key=key)
        for name in relays:
            self.announced(stage, name)
        for name in stage.network.clients():
            self.run(stage, name, "fetch", relays=",".join(urls[relay] for relay in relays), key=key)

    def publish(self, stage: Stage) -> None:
        whole = stage.folder / "whole"
        whole.mkdir()
        stage.file.rename(whole / "given")
        whole.rename(stage.at("origin") / "published" / "v000000")

    def run(self, stage: Stage, name: str, command: str, **known: object) -> None:
        line = SHOAL[command].format(address=stage.address(name), **known)
        stage.start(name, ["sh", "-c", f"{sys.executable} -m shoal {line}"])

    def announced(self, stage: Stage, name: str) -> dict[str, str]:
        """Return the JSON line that a server prints once it listens."""
        stage.wait([name], "log", holds="{")
        return json.loads(next(line for line in stage.log(name).splitlines() if line.startswith("{")))


class Shardcast:
    """The public package shardcast 0.3.2, with the change in shardcast_node.py. Middle nodes look for a version every second
    (default: 30 s). Their only upstream is the origin, because a sibling without a shard would cost them waits of 2 s, then
    15 s. With shards of 10 MB times the scale, transfers took 5.5 to 7 times the bound. With the default of 50 MB they took
    9 times the bound. The package writes temporary files to /tmp and to its own folder, so each node has its own copy of the
    package and its own /tmp."""

    def start(self, stage: Stage) -> None:
        (package,) = (FOLDER / "peers" / "lib").glob("python3*/site-packages/shardcast")
        for name in stage.network.nodes:
            shutil.copytree(package, stage.at(name) / "shardcast")
            shutil.copy(HERE / "shardcast_node.py", stage.at(name))
            (stage.at(name) / "tmp").mkdir()
            (stage.at(name) / "store").mkdir()
            probe = stage.at(name) / "store" / "data1.bin"  # clients measure a server's speed with this file
            probe.write_bytes(bytes(100_000))
        self.run(stage, "origin", "shardcast_node.py", "origin", str(int(10e6 * stage.scale)))
        stage.wait(["origin"], "ready")
        relays = stage.network.relays()
        origin = f"http://{stage.address('origin')}"
        for name in relays:
            argv = ["-m", "shardcast.middle_node", "--upstream", origin, "--data-dir", "store", "--port", "80"]
            self.run(stage, name, *argv, "--check-interval", "1")
        stage.wait(relays, "store/distribution.txt")
        for name in stage.network.clients():
            urls = [f"http://{stage.address(relay)}" for relay in relays]
            self.run(stage, name, "shardcast_node.py", "client", *urls)
        stage.wait(stage.network.clients(), "ready")

    def run(self, stage: Stage, name: str, *argv: str) -> None:
        apart = ["unshare", "--mount", "sh", "-c", 'mount --bind tmp /tmp && exec "$0" "$@"']
        stage.start(name, [*apart, PEERS_PYTHON, *argv])

    def publish(self, stage: Stage) -> None:
        tell(stage, "origin", str(stage.file))


class BitTorrent:
    """libtorrent over TCP only, without choking. All peers, including relays, get each other's addresses, so no tracker is
    needed. With the origin as a super seed, a transfer took 1.6 to 1.7 times the bound. With a plain seed it took 2.0
    to 2.5 times the bound, and with `high_performance_seed` 2.8 times. libtorrent sends nothing for the first 10 s."""

    def start(self, stage: Stage) -> None:
        nodes = stage.network.nodes
        addresses = [stage.address(name) for name in nodes]
        for name in nodes:
            known = [stage.address(name), stage.address("origin"), str(stage.scale), *addresses]
            stage.start(name, [PEERS_PYTHON, HERE / "torrent_node.py", *known])
        stage.wait(nodes, "ready")

    def publish(self, stage: Stage) -> None:
        tell(stage, "origin", str(stage.file))


def tell(stage: Stage, name: str, line: str) -> None:
    process = stage.started[name]
    process.stdin.write(line + "\n")
    process.stdin.flush()


SYSTEMS: dict[str, System] = {
    "shoal": Shoal(),
    "shardcast": Shardcast(),
    "curl": Star(),
    "aria2": Tree(),
    "bittorrent": BitTorrent(),
}
