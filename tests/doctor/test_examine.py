"""Each fact that stops or slows a role, one at a time, against a machine that is fit for all of them."""

from dataclasses import replace

import pytest

from shoal.config import Config, parse
from shoal.doctor import Facts, Finding, Reach, examine
from shoal.doctor.facts import EXTRAS, Role
from shoal.doctor.finding import ok, warning

GIB = 1 << 30
FIT = Facts(
    python=(3, 12, 3),
    torch="2.13.0+cpu",
    gflops={"float32": 170.0, "bfloat16": 800.0},
    inexact={"float32": "", "bfloat16": "no"},
    cores=8,
    threads=8,
    memory_bytes=32 * GIB,
    free_memory_bytes=30 * GIB,
    folder="here",
    free_disk_bytes=100 * GIB,
    open_files=(1024, 65536),
    ports={8700: ""},
    sandbox={"bubblewrap": "", "kernel": "no userns", "rlimits": ""},
    servers={"nginx": "nginx/1.22", "postgres": ""},
    extras=dict.fromkeys(EXTRAS, False) | {"s3": True},
)


def found(name: str, role: Role = "run", config: Config | None = None, **changed: object) -> Finding:
    return next(one for one in examine(role, replace(FIT, **changed), config=config) if one.name == name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "role", ["run", "coordinator", "learner", "origin", "relay", "worker", "validator", "evaluator"]
)
def test_nothing_is_wrong_with_a_fit_machine(role: Role) -> None:
    assert {one.verdict for one in examine(role, FIT)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "verdict", "changed", "said"),
    [
        ("python", "fails", {"python": (3, 10, 1)}, "install Python 3.11"),
        ("python", "warning", {"python": (3, 15, 0)}, "nobody has tried"),
        ("system", "warning", {"system": "Darwin"}, "Darwin"),
        ("system", "warning", {"architecture": "aarch64"}, "aarch64"),
        ("torch", "fails", {"torch": "", "torch_error": "no libgomp"}, "no libgomp"),
        ("torch", "fails", {"torch": "2.5.1"}, "2.6 or newer"),
        ("device", "fails", {"device": "cuda", "device_error": "no driver"}, "nvidia-smi"),
        ("device", "warning", {"accelerators": ["H200", "H200"]}, "2 of H200"),
        ("speed", "warning", {"gflops": {"float32": 3.0, "bfloat16": 1.0}}, "float32 3"),
        ("numerics", "warning", {"inexact": {"float32": "rows differ", "bfloat16": "x"}}, "rows differ"),
        ("memory", "fails", {"memory_bytes": 2 * GIB}, "another machine"),
        ("memory", "warning", {"free_memory_bytes": GIB}, "end other programs"),
        ("disk", "fails", {"free_disk_bytes": GIB // 2}, "free space"),
        ("disk", "warning", {"free_disk_bytes": 5 * GIB}, "small model"),
        ("disk", "fails", {"folder_error": "/x cannot be written by this user"}, "/x"),
        ("files", "fails", {"open_files": (100, 100)}, "LimitNOFILE"),
        ("files", "warning", {"open_files": (1024, 1024)}, "ulimit -Hn"),
        ("port", "fails", {"ports": {8700: "Address already in use"}}, "8700"),
        ("sandbox", "warning", {"sandbox": {"bubblewrap": "no bwrap", "rlimits": ""}}, "no bwrap"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(name: str, verdict: str, changed: dict[str, object], said: str) -> None:
    one = found(name, **changed)
    assert one.verdict == verdict
    assert said in one.line() and one.remedy


def test_a_machine_without_torch_is_told_so_once() -> None:
    names = [one.name for one in examine("worker", replace(FIT, torch="", torch_error="none", gflops={}, inexact={}))]
    assert "torch" in names and not {"device", "speed", "numerics"} & set(names)


def test_a_relay_needs_neither_torch_nor_a_sandbox() -> None:
    names = {one.name for one in examine("relay", replace(FIT, torch="", sandbox={}, gflops={}, inexact={}))}
    assert names == {"python", "memory", "disk", "files", "port", "servers", "extras"}


def test_what_the_run_requires_of_a_worker_counts_for_workers_only() -> None:
    config = parse({"requirements": {"memory_gib": 64}, "tasks": {"sources": [{"generator": "arithmetic"}]}})
    assert found("memory", "worker", config).verdict == "fails"
    assert "requirements.memory_gib" in found("memory", "worker", config).line()
    assert found("memory", "validator", config).verdict == "ok"


@pytest.mark.parametrize(
    ("reach", "verdicts"),
    [
        (Reach("http://c", "coordinator", took_s=0.01), {"coordinator": "ok", "clock": "ok"}),
        (Reach("http://c", "coordinator", took_s=2.0), {"coordinator": "warning", "clock": "ok"}),
        (Reach("http://c", "coordinator", behind_s=3.0), {"coordinator": "ok", "clock": "ok"}),
        (Reach("http://c", "coordinator", behind_s=-90.0), {"coordinator": "ok", "clock": "warning"}),
        (Reach("http://c", "coordinator", "refused"), {"coordinator": "fails"}),
        (Reach("http://r", "relay", "refused"), {"relay": "fails"}),
        (Reach("http://r", "relay", behind_s=90.0), {"relay": "ok"}),
    ],
)
def test_each_address_is_judged_by_its_answer(reach: Reach, verdicts: dict[str, str]) -> None:
    network = [one for one in examine("worker", FIT, [reach]) if one.name in ("coordinator", "relay", "clock")]
    assert {one.name: one.verdict for one in network} == verdicts


def test_a_finding_has_a_remedy_exactly_if_something_is_wrong() -> None:
    with pytest.raises(ValueError, match="a remedy belongs"):
        warning("disk", "full", "")
    assert ok("disk", "5 GiB").remedy == ""


def test_a_line_goes_on_below_where_the_terminal_ends() -> None:
    long = warning("numerics", "fast only: " + "why " * 30, "calibrate")
    first, *below = long.line(80).splitlines()
    assert first.startswith("warning  numerics") and below and all(one.startswith(" " * 23) for one in below)
    assert max(map(len, [first, *below])) <= 80
    assert " ".join(long.line(80).split()) == " ".join(long.line().split())


def test_numbers_read_well() -> None:
    assert found("speed", threads=1).found.endswith("on 1 thread")
    said = found("servers", servers={"nginx": "nginx version: nginx/1.22.1", "postgres": ""}).found
    assert said == "optional: nginx 1.22.1, postgres is not installed"
