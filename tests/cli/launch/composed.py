"""Start the services of deploy/compose.yaml as processes, with their commands and environment but without containers.

Each service's name resolves to its own address in a private network. A folder replaces `/data`. A service starts once the
services that it depends on are healthy. The config is replaced by a short tiny run, with one thread for each process.
Invariant: every process is inside the namespaces that `main` moves this program into, and ends when this program ends.
`test_composed` starts this program, which needs root on Linux, iproute2 and util-linux.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.cli.launch.sites import DEADLINE_S, ROOT, START_S, enter_namespaces
from tests.cli.support import sets

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
    """Return the services of deploy/compose.yaml, with variables replaced by `given` or their defaults."""
    text = DEFAULTED.sub(lambda match: (given or {}).get(match[1], match[2]), (DEPLOY / "compose.yaml").read_text())
    services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return services


def environment(data: Path) -> dict[str, str]:
    """Return the environment that the image sets, with this folder as /data."""
    set_in_image = re.findall(r"^ENV (\w+)=(\S+)$", (DEPLOY / "Containerfile.cpu").read_text(), re.M)
    return os.environ | {name: value.replace("/data", str(data)) for name, value in set_in_image}


def name_addresses(names: list[str], out: Path) -> None:
    """Give each name a private address, for this program and its children."""
    own = {name: f"172.18.0.{number}" for number, name in enumerate(names, 11)}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in own.items())]
    (out / "hosts").write_text("\n".join(lines) + "\n")
    subprocess.run(["mount", "--bind", out / "hosts", "/etc/hosts"], check=True)
    script = NETWORK + "".join(f"ip address add {address}/32 dev lo\n" for address in own.values())
    subprocess.run(["sh", "-ec", script], check=True)


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
        """Wait until the service's own health check passes."""
        kind, program, *words = service["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        deadline_s = time.monotonic() + START_S
        while subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline_s:
                raise RuntimeError("the coordinator is not healthy")
            time.sleep(0.5)


def main(out: Path) -> None:
    enter_namespaces("-m", "tests.cli.launch.composed", str(out))
    all_services = services(THREADS)
    name_addresses(list(all_services), out)
    host = Host(out)
    host.finish("sft", ["sft"])
    init = shlex.split(all_services.pop("init")["command"].replace(CONFIG, "tiny"))
    host.finish("init", [*init, *sets(*SETTINGS)])
    host.start("coordinator", shlex.split(all_services["coordinator"]["command"]))
    host.until_healthy(all_services.pop("coordinator"))
    for name, service in all_services.items():
        assert service["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
        host.start(name, shlex.split(service["command"]))
    deadline_s = time.monotonic() + DEADLINE_S
    ended = {name: host.running[name].wait(max(1.0, deadline_s - time.monotonic())) for name in all_services}
    host.running["coordinator"].terminate()
    ended["coordinator"] = host.running["coordinator"].wait(START_S)
    shutil.copytree(host.data / "learner" / "model", host.data / "pool" / "run" / "model")
    host.finish("audit", ["audit", "pool/run", "--proofs", "1"])
    (out / "result.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
