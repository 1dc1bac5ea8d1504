"""A client or the origin of the public package shardcast. The peers' Python runs it in a folder with a copy of the package.

shardcast_node.py origin SHARD_BYTES     reads the file's name from standard input
shardcast_node.py client URL...          downloads the first published version, and creates `done`
"""

import sys
import time
from pathlib import Path

import shardcast

POLL_S = 0.2


class Client(shardcast.ClientNode):
    """Keeps the first list of versions that is not empty. The package would get the list twice more, from any server. If
    that server did not have the version yet, the client would retry ten nonexistent shards forever."""

    listed: dict[str, str] | None = None

    def list_available_versions(self) -> dict[str, str]:
        self.listed = self.listed or super().list_available_versions()
        return self.listed


if sys.argv[1] == "origin":
    shardcast.initialize("store", 80)
    Path("ready").touch()
    shardcast.broadcast(sys.stdin.readline().strip(), int(sys.argv[2]))
    while True:
        time.sleep(60)

client = Client(sys.argv[2:], "parts")
Path("ready").touch()
while "v1" not in client.list_available_versions():
    time.sleep(POLL_S)
while not client.download_version("v1", "file"):
    time.sleep(POLL_S)
Path("done").touch()
