"""Run the code blocks of docs/operate.md that name a site, unchanged, in network namespaces. Write result.json.

    internet           this program's namespace, which routes between the sites' public addresses
    trusted, relays    one public address each
    nat                a public address, with which NAT replaces the address of home
    home               a private address, without a route from outside

Invariant: every process is inside the namespaces that `enter_namespaces` moves this program into, and ends when this
program ends.
`test_elsewhere` starts this program, which needs root on Linux, iproute2, util-linux, nft, nginx and openssl.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

INSIDE = "--inside"
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "operate.md"
BLOCK = re.compile(r"^```sh\n# on (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVES = re.compile(r"^(nginx|shoal (coordinator|learner|origin|relay|validator|worker|evaluator)) ")
PROGRAMS = ("ip", "unshare", "setpriv", "nsenter", "nft", "nginx", "openssl")
APART = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
DEADLINE_S, START_S = 900.0, 60.0

NETWORK = """set -e
mount -t tmpfs tmpfs /run
sysctl -qw net.ipv4.ip_forward=1
ip link set lo up
site() {  # name, address, gateway
    ip netns add $1
    ip -n $1 link set lo up
    ip link add $1 type veth peer name wan netns $1
    ip address add $3/24 dev $1
    ip link set $1 up
    ip -n $1 address add $2/24 dev wan
    ip -n $1 link set wan up
    ip -n $1 route add default via $3
}
site trusted 192.0.2.10 192.0.2.1
site relays 198.51.100.20 198.51.100.1
site nat 203.0.113.30 203.0.113.1
ip netns add home
ip -n home link set lo up
ip -n nat link add lan type veth peer name wan netns home
ip -n nat address add 10.0.0.1/24 dev lan
ip -n nat link set lan up
ip -n home address add 10.0.0.2/24 dev wan
ip -n home link set wan up
ip -n home route add default via 10.0.0.1
nsenter --net=/run/netns/nat sh -ec 'sysctl -qw net.ipv4.ip_forward=1
nft add table ip nat
nft add chain ip nat post "{ type nat hook postrouting priority 100 ; }"
nft add rule ip nat post oifname wan masquerade'
"""


def missing() -> str:
    """Return why this machine cannot have such sites; "" if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"needs {', '.join(absent)}"
    made = subprocess.run([*APART, "sh", "-c", NETWORK], capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else f"no such network here: {made.stderr.strip()[-200:]}"


def commands(page: str) -> list[tuple[str, str]]:
    """Return each command's site and text, in order. A command may have several lines."""
    commands = []
    for site, block in BLOCK.findall(page):
        heredoc = r"(cat > \S+ <<'END'\n.*?^END$)"
        text = re.sub(heredoc, lambda match: match[1].replace("\n", "\0"), block, flags=re.M | re.S)
        lines = text.replace("\\\n", " ").splitlines()
        commands += [(site, line.replace("\0", "\n").strip()) for line in lines if line.strip()]
    return commands


class Sites:
    """The sites, each with a folder and an environment, on which `do` runs the page's commands."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.environments: dict[str, dict[str, str]] = {}
        self.serving: dict[str, subprocess.Popen[bytes]] = {}
        for site in ("trusted", "relays", "home"):
            (out / site).mkdir()
            self.environments[site] = os.environ | {"OMP_NUM_THREADS": "1"}

    def do(self, site: str, command: str) -> None:
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environments[site][name] = value
        elif command.startswith("scp "):
            *names, where = command.split()[1:]
            for name in names:
                shutil.copy(self.out / site / name, self.out / where.rstrip(":") / Path(name).name)
        elif SERVES.match(command):
            self.serve(site, command)
        else:
            script = command.replace("shoal ", f"{sys.executable} -m shoal ", 1)
            self.run(site, ["sh", "-ec", script])

    def serve(self, site: str, command: str) -> None:
        words = command.split()
        name = words[words.index("--dir") + 1] if "--dir" in words else f"nginx-{site}"
        if words[0] == "shoal":
            words = [sys.executable, "-m", "shoal", *words[1:]]
        with (self.out / f"{name}.log").open("wb") as log:
            inside = ["nsenter", f"--net=/run/netns/{site}", *words]
            self.serving[name] = subprocess.Popen(
                inside, cwd=self.out / site, env=self.environments[site], stdout=log, stderr=log
            )
        if name in ("pool", f"nginx-{site}"):
            time.sleep(1.0)
        if self.serving[name].poll() is not None:
            raise RuntimeError(f"{command}: {(self.out / f'{name}.log').read_text()[-2000:]}")

    def run(self, site: str, argv: list[str]) -> str:
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{site}", *argv],
            cwd=self.out / site,
            env=self.environments[site],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{argv}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        return done.stdout

    def wait(self, names: list[str]) -> dict[str, int]:
        """Wait for these nodes to end. Return their exit statuses."""
        deadline_s = time.monotonic() + DEADLINE_S
        return {name: self.serving[name].wait(max(deadline_s - time.monotonic(), 1)) for name in names}


def reaches(site: str, address: str, port: int) -> bool:
    """Return whether this site can connect to the address."""
    ask = f"import socket; socket.create_connection(('{address}', {port}), 2)"
    done = subprocess.run(
        ["nsenter", f"--net=/run/netns/{site}", sys.executable, "-c", ask], capture_output=True, check=False
    )
    return done.returncode == 0


def enter_namespaces(*arguments: str) -> None:
    """Run Python with these arguments again, inside namespaces of its own, and exit; return only inside them."""
    if INSIDE not in sys.argv:
        command = ["setpriv", "--pdeathsig", "KILL", *APART, sys.executable, *arguments, INSIDE]
        sys.exit(subprocess.run(command, check=False).returncode)
    os.environ["PATH"] += ":/usr/sbin:/sbin"


def main(out: Path) -> None:
    enter_namespaces(*sys.argv)
    subprocess.run(["sh", "-c", NETWORK], check=True)
    sites = Sites(out)
    for site, command in commands(PAGE.read_text()):
        sites.do(site, command)
    listening = sites.run("home", ["ss", "-Hltn"])
    inbound = {f"{site} to home": reaches(site, "10.0.0.2", 22) for site in ("trusted", "relays")}
    nodes = [name for name in sites.serving if name != "pool" and not name.startswith("nginx")]
    ended = sites.wait(nodes)
    sites.serving["pool"].terminate()
    sites.serving["pool"].wait(START_S)
    shutil.copytree(out / "trusted" / "learner" / "model", out / "trusted" / "pool" / "model")
    audit = sites.run("trusted", [sys.executable, "-m", "shoal", "audit", "pool", "--rerun", "0"])
    result = {"ended": ended, "listening_at_home": listening, "inbound": inbound, "audit": audit.splitlines()[-2]}
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
