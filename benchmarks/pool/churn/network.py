"""One network namespace per process, joined by a bridge, so that any process can be cut off from all others.

Invariant: everything is inside the mount, process and network namespaces that `enter` moves this program into, and ends with
the program. Nothing reaches the outside network. Needs root on Linux and iproute2. `node.py` moves a process into its
namespace.
"""

import shutil
import subprocess

from benchmarks.common import namespaces

SUBNET = "10.78.0"


def missing() -> str:
    """Return why this machine cannot have such a network, or "" if it can."""
    if not all(map(shutil.which, ("unshare", "ip", "setpriv"))):
        return "needs Linux with util-linux and iproute2"
    made = subprocess.run([*namespaces.APART, "sh", "-c", BRIDGE], capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip().splitlines()[-1:]}"


BRIDGE = f"""set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add bridge0 type bridge
ip address add {SUBNET}.1/24 dev bridge0
ip link set bridge0 up
"""


def enter() -> None:
    """Restart this program in its own namespaces, and create the bridge there."""
    namespaces.enter()
    run("sh", "-c", BRIDGE)


class Network:
    def __init__(self, names: list[str]) -> None:
        self.names = names
        for name in names:
            run("sh", "-ec", self._setup(name))

    def address(self, name: str) -> str:
        return f"{SUBNET}.{self.names.index(name) + 2}"

    def cut(self, name: str) -> None:
        """Drop all packets from and to this process from now on."""
        run("ip", "link", "set", self._link(name), "down")

    def mend(self, name: str) -> None:
        run("ip", "link", "set", self._link(name), "up")

    def _link(self, name: str) -> str:
        return f"node{self.names.index(name)}"

    def _setup(self, name: str) -> str:
        return f"""
            ip netns add {name}
            ip link add {self._link(name)} type veth peer name wan0 netns {name}
            ip link set {self._link(name)} master bridge0 up
            ip -n {name} address add {self.address(name)}/24 dev wan0
            ip -n {name} link set wan0 up
            ip -n {name} link set lo up
        """


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)
