"""The metrics, commands and images in deploy/ fit this version, and a real nginx runs with the proxy's config."""

import json
import re
import shlex
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from shoal.cli.arguments import read_config
from shoal.cli.main import command_line
from shoal.coordinator.folder import invited_nodes
from tests.cli.launch.composed import services
from tests.coordinator.http.support import served
from tests.servers import free_port

DEPLOY = Path(__file__).parent.parent / "deploy"
METRIC = re.compile(r"\bshoal_[a-z_]+\b")
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of all metrics that a coordinator exports, including metrics without samples."""
    with served(tmp_path_factory.mktemp("pool")) as pool:
        text = httpx.get(f"{pool.url}/metrics", timeout=30).text
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE shoal_")}


def expressions() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    panels = json.loads((DEPLOY / "prometheus" / "dashboard.json").read_text())["panels"]
    alerts = [rule["expr"] for group in rules for rule in group["rules"]]
    return alerts + [target["expr"] for panel in panels for target in panel["targets"]]


def test_alerts_and_dashboard_use_only_exported_metrics_and_the_dashboard_uses_all_of_them(exported: set[str]) -> None:
    watched = {name for text in expressions() for name in METRIC.findall(text)}
    assert len(watched) > 15
    assert watched - exported == set()
    panels = (DEPLOY / "prometheus" / "dashboard.json").read_text()
    assert {name for name in exported if name not in panels} == set()


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    page = (DEPLOY.parent / "docs" / "operate.md").read_text().lower()
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert f"| {rule['annotations']['runbook']} |" in page, rule["alert"]
            assert rule["labels"]["severity"] in ("page", "warn") and rule["annotations"]["summary"]


def test_the_dashboard_has_what_grafanas_importer_needs() -> None:
    board = json.loads((DEPLOY / "prometheus" / "dashboard.json").read_text())
    assert board["title"] and board["uid"] and board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(board["panels"])
    assert {panel["type"] for panel in board["panels"]} == {"timeseries"}


def pods() -> dict[str, dict[str, Any]]:
    """Return the spec of every StatefulSet for Kubernetes, by name."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    objects = [each for path in files for each in yaml.safe_load_all(path.read_text())]
    return {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "StatefulSet"}


def commands() -> list[tuple[str, str]]:
    """Return every `shoal` command line in deploy/, with its file."""
    lines = [("kubernetes", init_of(pods()["coordinator"]))]
    for spec in pods().values():
        for container in spec["template"]["spec"]["containers"]:
            lines.append(("kubernetes", shlex.join(container["args"]).replace("$(POD)", "worker-0")))
    lines += [("compose.yaml", service["command"]) for service in services().values()]
    for path in [*DEPLOY.glob("systemd/*"), *DEPLOY.glob("slurm/*"), DEPLOY / "skypilot.yaml"]:
        for line in path.read_text().splitlines():
            if not line.startswith("#") and (match := re.search(r"(?:bin/|exec |^ *|-m )shoal ([a-z%].*)", line)):
                lines.append((path.name, match[1]))
    return lines


def init_of(coordinator: dict[str, Any]) -> str:
    """Return the command that creates the pool in Kubernetes."""
    [script] = coordinator["template"]["spec"]["initContainers"][0]["args"]
    return str(script.partition("exec shoal ")[2])


@pytest.mark.parametrize(("file", "command"), commands())
def test_every_command_can_be_parsed(file: str, command: str) -> None:
    words = shlex.split(re.sub(r"\$\{?SLURM_CPUS_PER_TASK\}?", "8", command).replace("%i", "worker"))
    command_line().parse_args(words)


def test_every_kind_of_file_has_commands() -> None:
    assert {file for file, _ in commands()} >= {
        "compose.yaml", "shoal-coordinator.service", "shoal-origin.service", "shoal@.service", "workers.sbatch",
        "learner.sbatch", "skypilot.yaml", "kubernetes",
    }  # fmt: skip


def made_by(init: str) -> set[str]:
    """Return the names of the invites that this `shoal pool init` command creates."""
    return set(invited_nodes(read_config(command_line().parse_args(shlex.split(init)))))


def test_the_docker_compose_pool_has_a_service_for_every_invite() -> None:
    commands = [service["command"] for service in services().values()]
    named = {match[1] for text in commands if (match := re.search(r"invites/(\S+)\.invite", text))}
    assert named == made_by(services()["init"]["command"])
    assert {"coordinator", "origin", "relay"} <= set(services())  # nodes reach these services by name


def test_the_kubernetes_pool_has_a_pod_for_every_invite_and_every_volume_exists() -> None:
    sets = pods()
    assert set(sets) == {"coordinator", "learner", "relay", "validator", "worker", "evaluator"}
    init = command_line().parse_args(shlex.split(init_of(sets["coordinator"])))
    made = made_by(init_of(sets["coordinator"]))
    named = set()
    for name, spec in sets.items():
        pod = spec["template"]["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert spec["serviceName"] == "shoal" and pod["automountServiceAccountToken"] is False
        claims = [claim["metadata"] for claim in spec["volumeClaimTemplates"]]
        volumes = {volume["name"] for volume in [*pod.get("volumes", []), *claims]}
        for container in pod["containers"]:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert mounts.keys() == volumes
            if name == "coordinator":
                continue
            invite = mounts["invites"]  # one file of the secret, so that no container can use another node's invite
            assert container["args"][1:3] == ["--join", invite["mountPath"]]
            file = invite.get("subPath") or invite["subPathExpr"]
            assert file.endswith(".invite")
            named |= {file.replace("$(POD)", f"{name}-{n}").removesuffix(".invite") for n in range(spec["replicas"])}
    assert named == made
    hosts = {match for word in init.overrides for match in re.findall(r"=([a-z]+)-0\.shoal:[0-9]+$", word)}
    assert hosts == {"learner", "relay"} and init.url == "http://coordinator-0.shoal:8700"


def test_images_and_rented_workers_install_only_the_files_whose_hashes_are_locked() -> None:
    constraints = set((DEPLOY.parent / "constraints.txt").read_text().splitlines())
    pinned = {line.partition("==")[0] for line in constraints}  # but not torch's own packages for GPUs
    for path in sorted(DEPLOY.glob("requirements-*.txt")):
        for entry in re.split(r"\n(?=[a-z])", re.sub(r"(?m)^#.*\n", "", path.read_text()).strip()):
            version = entry.split()[0].replace("+cpu", "")
            assert version in constraints or version.partition("==")[0] not in pinned, (path.name, version)
            hashes = re.findall(r"--hash=(\S+)", entry)
            assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), (path.name, version)
    for name in ("Containerfile.cpu", "Containerfile.cuda", "skypilot.yaml"):
        text = (DEPLOY / name).read_text()
        for line in text.splitlines():
            if "pip install" in line:
                assert "--require-hashes" in line or "--no-deps --no-build-isolation" in line, (name, line)
        for path in re.findall(r"deploy/requirements-[a-z]+\.txt", text):
            assert (DEPLOY.parent / path).is_file()


def test_a_rented_worker_gets_a_list_of_files_and_no_folder_that_may_hold_a_pool() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert "workdir" not in task
    sent = [source for target, source in task["file_mounts"].items() if "invite" not in target]
    assert sent and set(sent) <= {
        f"./{name}" for name in ("src", "configs", "deploy", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
    }


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_can_be_built_on_a_digest_and_has_the_python_of_its_lock(name: str) -> None:
    text = (DEPLOY / f"Containerfile.{name}").read_text()
    assert re.search(r"^ARG BASE=docker\.io/library/python:3\.1[12]-slim-bookworm\nFROM \$BASE$", text, re.MULTILINE)
    assert [line for line in text.splitlines() if line.startswith("FROM ")] == ["FROM $BASE"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["shoal-coordinator.service", "shoal-origin.service", "shoal@worker.service"])
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    """systemd may complain only that the program or the user is missing."""
    source = "shoal@.service" if "@" in name else name
    text = (DEPLOY / "systemd" / source).read_text().replace("/opt/shoal/bin/shoal", "/bin/true")
    (tmp_path / name).write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True, timeout=60)
    wrong = [line for line in done.stderr.splitlines() if name in line]
    assert wrong == []


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_a_coordinator_answers_through_nginx_and_tls(tmp_path: Path) -> None:
    assert NGINX is not None
    port = free_port()
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    openssl = shlex.split("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2")
    subprocess.run([*openssl, "-keyout", key, "-out", cert, *subject], check=True, capture_output=True)
    (tmp_path / "pool").mkdir()
    with served(tmp_path / "pool") as pool:
        site = (DEPLOY / "proxy" / "nginx.conf").read_text()
        changed = {
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "server 127.0.0.1:8700 ": f"server {pool.url.removeprefix('http://')} ",
            "/etc/ssl/trusted.example.crt": str(cert),
            "/etc/ssl/trusted.example.key": str(key),
            "trusted.example;": "localhost;",
        }
        for old, new in changed.items():
            assert old in site
            site = site.replace(old, new)
        around = f"daemon off; pid {tmp_path}/pid; error_log stderr warn; events {{}}\nhttp {{ access_log off;\n"
        temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        around += "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in temporary)
        config = tmp_path / "nginx.conf"
        config.write_text(f"{around}{site}}}\n")
        tested = subprocess.run([NGINX, "-t", "-c", config], capture_output=True, text=True)
        assert tested.returncode == 0, tested.stderr
        server = subprocess.Popen([NGINX, "-c", config], stderr=subprocess.DEVNULL)
        try:
            trusts = ssl.create_default_context(cafile=str(cert))
            with httpx.Client(verify=trusts, base_url=f"https://localhost:{port}") as client:
                assert answered(client, "/healthz").json()["run"]
                assert client.get("/v1/run").status_code == 200
                assert "shoal_open_step" in client.get("/metrics").text
                assert client.post("/v1/heartbeat", content=b"{}").status_code == 401
        finally:
            server.terminate()
            server.wait(10)


def answered(client: httpx.Client, path: str) -> httpx.Response:
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return client.get(path).raise_for_status()
        except httpx.TransportError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
