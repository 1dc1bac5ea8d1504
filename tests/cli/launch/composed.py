"""Starts the services of deploy/compose.yaml as processes: their commands and environment, no container. Prints nothing.

A service's name leads to an address of its own in a network of this program's own, `/data` is a folder, and a service
starts when what it depends on is healthy. Changed are the config, to a short tiny run, and the threads of each process.
Invariant: everything is inside the namespaces that `main` moves this program into, and ends with it.
Started by `test_composed`. Needs root on Linux, iproute2 and util-linux.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.cli.launch.sites import APART, DEADLINE_S, INSIDE, ROOT, START_S

DEPLOY = ROOT / "deploy"
CONFIG = "quickstart"
SETTINGS = (
    "run.steps=3",
    "coordinator.prompts_per_step=8",
    "workers.groups_per_submission=4",
    "tasks.heldout=16",
    "evaluator.n=16",
)
THREADS = {"THREADS": "1"}
DEFAULTED = re.compile(r"\$\{(\w+):-([^}]*)\}")
NETWORK = "ip link set lo up\n"
SHOAL = [sys.executable, "-m", "shoal"]


def services(given: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Of deploy/compose.yaml, with variables replaced as compose does it: by `given`, or by their defaults."""
    text = DEFAULTED.sub(lambda found: (given or {}).get(found[1], found[2]), (DEPLOY / "compose.yaml").read_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def environment(data: Path) -> dict[str, str]:
    """What the image sets, with /data as this folder."""
    set_in_image = re.findall(r"^ENV (\w+)=(\S+)$", (DEPLOY / "Containerfile.cpu").read_text(), re.M)
    return os.environ | {name: value.replace("/data", str(data)) for name, value in set_in_image}


def name_addresses(names: list[str], out: Path) -> None:
    """Each name leads to a private address of its own, for this program and what it starts."""
    own = {name: f"172.18.0.{number}" for number, name in enumerate(names, 11)}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in own.items())]
    (out / "hosts").write_text("\n".join(lines) + "\n")
    subprocess.run(["mount", "--bind", out / "hosts", "/etc/hosts"], check=True)
    subprocess.run(
        ["sh", "-ec", NETWORK + "".join(f"ip address add {one}/32 dev lo\n" for one in own.values())], check=True
    )


class Host:
    """The machine that the services run on."""

    def __init__(self, out: Path) -> None:
        self.data = out / "data"
        (self.data / "pool").mkdir(parents=True)
        self.logs = out
        self.environment = environment(self.data)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.logs / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [*SHOAL, *command], cwd=self.data, env=self.environment, stdout=log, stderr=log
            )
        return self.running[name]

    def finish(self, name: str, command: list[str]) -> None:
        if status := self.start(name, command).wait(DEADLINE_S):
            raise RuntimeError(f"{name} ended with {status}: {(self.logs / f'{name}.log').read_text()[-2000:]}")
        del self.running[name]

    def until_healthy(self, service: dict[str, Any]) -> None:
        """By the service's own check."""
        kind, program, *words = service["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        deadline_s = time.monotonic() + START_S
        while subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline_s:
                raise RuntimeError("the coordinator is not healthy")
            time.sleep(0.5)


def main(out: Path) -> None:
    if INSIDE not in sys.argv:
        again = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *APART,
            sys.executable,
            "-m",
            "tests.cli.launch.composed",
            out,
            INSIDE,
        ]
        sys.exit(subprocess.run(again, check=False).returncode)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    all_of_them = services(THREADS)
    name_addresses(list(all_of_them), out)
    host = Host(out)
    host.finish("sft", ["sft"])
    init = shlex.split(all_of_them.pop("init")["command"].replace(CONFIG, "tiny"))
    host.finish("init", [*init, *(word for setting in SETTINGS for word in ("--set", setting))])
    host.start("coordinator", shlex.split(all_of_them["coordinator"]["command"]))
    host.until_healthy(all_of_them.pop("coordinator"))
    for name, service in all_of_them.items():
        assert service["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
        host.start(name, shlex.split(service["command"]))
    deadline_s = time.monotonic() + DEADLINE_S
    ended = {name: host.running[name].wait(max(1.0, deadline_s - time.monotonic())) for name in all_of_them}
    host.running["coordinator"].terminate()
    ended["coordinator"] = host.running["coordinator"].wait(START_S)
    host.finish("audit", ["audit", "pool/run", "--proofs", "1"])
    (out / "result.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
