"""Facts in, findings out: what a role needs, and what to do where it is missing.

Invariant: pure functions of facts. "fails" is what stops the role; "warning" is what costs speed, trust or comfort.
Called by `shoal doctor`. Left out: what a config's tasks, model and ports need here (`shoal run CONFIG --dry-run`), and
how much memory a model takes (`shoal plan`).
"""

import re
from collections.abc import Iterator

from shoal.config import Config
from shoal.doctor.facts import COMPUTING, EXTRAS, NO_LIMIT, Facts, Role
from shoal.doctor.finding import Finding, fails, ok, warning
from shoal.doctor.network import Reach

OLDEST, NEWEST = (3, 11), (3, 13)  # of Python: what pyproject.toml states; docs/operate.md says what was tested
OLDEST_TORCH = "2.6"
GIB = 1 << 30
LEAST_MEMORY: dict[Role, float] = {"run": 4.0, "learner": 2.0, "coordinator": 0.5, "origin": 0.5, "relay": 0.5}  # GiB
COMPUTING_MEMORY = 1.5  # GiB of a process that loads torch, transformers and a small model
LEAST_DISK_GIB, SCARCE_DISK_GIB = 1.0, 10.0
SLOW_GFLOPS = 20.0  # below it, even the smallest model trains for hours
FILES_NEEDED, FILES_WANTED = 256, 4096  # of a process that serves
CLOCK_S = 20.0  # as `protocol.clock` tells it
SLOW_S = 1.0
SERVING = ("run", "coordinator", "origin", "relay")


def examine(
    role: Role, facts: Facts, reached: list[Reach] | None = None, config: Config | None = None
) -> list[Finding]:
    """Everything that matters to `role`, in the order in which to fix it."""
    return [
        _python(facts),
        *_system(facts),
        *(_compute(facts) if role in COMPUTING else ()),
        _memory(role, facts, config),
        _disk(facts),
        *(_files(facts) if role in SERVING else ()),
        *_ports(facts),
        *(_sandbox(facts) if role in COMPUTING else ()),
        *_network(reached or []),
        *_servers(role, facts),
        *_extras(facts),
    ]


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST:
        return fails("python", version, f"install Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}")
    if facts.python[:2] > NEWEST:
        return warning("python", f"{version}, which nobody has tried", f"prefer {NEWEST[0]}.{NEWEST[1]}")
    return ok("python", version)


def _system(facts: Facts) -> Iterator[Finding]:
    if facts.system != "Linux" or facts.architecture not in ("x86_64", "AMD64"):
        yield warning(
            "system",
            f"{facts.system} on {facts.architecture}, on which Shoal was never run",
            "expect to find what is missing; Linux on x86_64 is what is tested",
        )


def _compute(facts: Facts) -> Iterator[Finding]:
    if not facts.torch:
        remedy = "pip install torch (make setup takes the CPU build)"
        yield fails("torch", f"cannot be imported: {facts.torch_error}", remedy)
        return
    if _numbers(facts.torch) < _numbers(OLDEST_TORCH):
        yield fails("torch", facts.torch, f"install torch {OLDEST_TORCH} or newer")
    else:
        yield ok("torch", facts.torch)
    if facts.device_error:
        yield fails("device", facts.device_error, "look at the driver with nvidia-smi")
        return
    seen = f", {len(facts.accelerators)} of {facts.accelerators[0]}" if facts.accelerators else ", no accelerator"
    if facts.accelerators and facts.device == "cpu":
        yield warning("device", f"cpu{seen}", 'set model.device = "cuda", and ask again with --device cuda')
    else:
        yield ok("device", facts.device + seen)
    yield _speed(facts)
    yield _numerics(facts)


def _speed(facts: Facts) -> Finding:
    said = (
        ", ".join(f"{name} {speed:.0f}" for name, speed in facts.gflops.items())
        + f" GFLOP/s on {facts.threads} thread{'s' * (facts.threads != 1)}"
    )
    if max(facts.gflops.values()) < SLOW_GFLOPS:
        return warning("speed", said, "is the machine busy? else use a faster one, or configs/tiny.toml only")
    return ok("speed", said)


def _numerics(facts: Facts) -> Finding:
    exact = [name for name, why in facts.inexact.items() if not why]
    if exact:
        return ok("numerics", f"exact in {' and '.join(exact)}: work is checked to the last bit within a class")
    why = next(iter(facts.inexact.values()))
    return warning(
        "numerics", f"fast only: {why}", "work is checked within tolerances; calibrate them (shoal calibrate)"
    )


def _memory(role: Role, facts: Facts, config: Config | None) -> Finding:
    said = f"{facts.memory_bytes / GIB:.1f} GiB, {facts.free_memory_bytes / GIB:.1f} free"
    least = LEAST_MEMORY.get(role, COMPUTING_MEMORY)
    if role == "worker" and config is not None and facts.memory_bytes < config.requirements.memory_gib * GIB:
        wanted = config.requirements.memory_gib
        return fails("memory", said, f"this run takes workers with {wanted:g} GiB or more (requirements.memory_gib)")
    if facts.memory_bytes < least * GIB:
        return fails("memory", said, f"a {role} takes {least:g} GiB or more, with a small model: use another machine")
    if facts.free_memory_bytes < least * GIB:
        return warning("memory", said, f"free {least:g} GiB before you start: end other programs")
    return ok("memory", said)


def _disk(facts: Facts) -> Finding:
    said = f"{facts.free_disk_bytes / GIB:.1f} GiB free in {facts.folder}"
    if facts.folder_error:
        return fails("disk", facts.folder_error, "choose another folder, or change its owner")
    if facts.free_disk_bytes < LEAST_DISK_GIB * GIB:
        return fails("disk", said, "free space, or choose a folder on another disk")
    if facts.free_disk_bytes < SCARCE_DISK_GIB * GIB:
        return warning("disk", said, "enough for a small model; `shoal run` says what a run needs before it starts")
    return ok("disk", said)


def _files(facts: Facts) -> Iterator[Finding]:
    soft, hard = facts.open_files
    said = "no limit" if hard == NO_LIMIT else f"{soft} open files, up to {hard}"
    remedy = "raise the hard limit: ulimit -Hn, or LimitNOFILE=65536 under systemd"
    if hard < FILES_NEEDED:
        yield fails("files", said, remedy)
    elif hard < FILES_WANTED:
        yield warning("files", f"{said}: few connections at once", remedy)
    else:
        yield ok("files", said)


def _ports(facts: Facts) -> Iterator[Finding]:
    for port, why in facts.ports.items():
        if why:
            yield fails(
                "port", f"cannot listen on {port}: {why}", f"end what listens there (ss -ltnp 'sport = :{port}')"
            )
        else:
            yield ok(
                "port", f"{port} is free here; whether others reach it, only they can say (curl HOST:{port}/healthz)"
            )


def _sandbox(facts: Facts) -> Iterator[Finding]:
    strong = [tier for tier, why in facts.sandbox.items() if not why and tier != "rlimits"]
    if strong:
        yield ok("sandbox", f"tiers that work: {', '.join(strong)}")
    else:
        why = "; ".join(why for tier, why in facts.sandbox.items() if why and tier != "rlimits")
        yield warning("sandbox", f"no strong tier works: {why}", "needed only for tasks that run model-written code")


def _network(reached: list[Reach]) -> Iterator[Finding]:
    for reach in reached:
        if reach.error:
            yield fails(reach.what, f"{reach.url}: {reach.error}", "check the address, the firewall and that it runs")
            continue
        of_run = f", run {reach.run}" if reach.run else ""
        said = f"{reach.url} answers in {reach.took_s * 1000:.0f} ms{of_run}"
        if reach.took_s > SLOW_S:
            yield warning(reach.what, said, "expect slow joins; look at the route and at its load")
        else:
            yield ok(reach.what, said)
    coordinators = [reach for reach in reached if reach.what == "coordinator" and not reach.error]
    for reach in coordinators:
        way = "behind" if reach.behind_s > 0 else "ahead of"
        said = (
            f"{abs(reach.behind_s):.0f} s {way} the coordinator's"
            if reach.behind_s
            else "agrees with the coordinator's"
        )
        far = abs(reach.behind_s) > CLOCK_S
        yield warning("clock", said, "set this machine's clock (NTP)") if far else ok("clock", said)


def _servers(role: Role, facts: Facts) -> Iterator[Finding]:
    if role in SERVING:
        said = [f"{name} {_number(version)}" for name, version in facts.servers.items()]
        yield ok("servers", f"optional: {', '.join(said)}")


def _number(version: str) -> str:
    """Of what a program says about itself."""
    found = re.search(r"[0-9]+(\.[0-9]+)+", version)
    return found[0] if found else version or "is not installed"


def _extras(facts: Facts) -> Iterator[Finding]:
    present = [name for name in EXTRAS if facts.extras.get(name)]
    absent = [name for name in EXTRAS if not facts.extras.get(name)]
    said = f"installed: {', '.join(present) or 'none'}"
    yield ok("extras", said + (f"; others by pip install 'shoal[NAME]': {', '.join(absent)}" if absent else ""))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()]
