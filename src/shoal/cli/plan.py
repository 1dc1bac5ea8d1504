"""`shoal plan CONFIG`: what a run would need, how fast it would be, and what it would cost, before anything is started.

Without devices it measures this machine and plans `shoal run` on it.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import Commands, UsageError, read_config, real, say, takes_config, whole

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.plan import Device, Fleet, Memory, Plan, Sizes, Work

FLEET = re.compile(r"(?:(?P<count>[0-9]{1,6})x)?(?P<name>[a-z0-9]+|[a-z]+=[^@]+)(?:@(?P<price>[0-9]+(?:\.[0-9]+)?))?")
RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)b", re.IGNORECASE)
ROLES = ("learner", "workers", "validators")
NEEDED, OFFLOADING = {"flops", "bandwidth", "memory"}, {"pcie", "host"}  # of a device in numbers
ONE_MACHINE = {"coordinator": 1, "origin": 1, "evaluator": 1, "learner": 1}


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="memory, seconds a step, bottleneck and cost of a run, by arithmetic")
    takes_config(parser)
    parser.add_argument(
        "--sizes", default="", metavar="FIELD=N,...", help="instead of the model's config.json: its fields"
    )
    parser.add_argument("--prompt", type=whole(1, 10**7), default=64, help="tokens of a prompt, mean (default: 64)")
    parser.add_argument("--length", type=whole(1, 10**7), help="tokens of a completion, mean (default: half the limit)")
    parser.add_argument("--useful", type=real(0.01, 1), default=0.8, help="share of groups that teach (default: 0.8)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="to compute in")
    what = "COUNTxDEVICE@PRICE, as 8xh100@2.5 or flops=1e14,bandwidth=1e12,memory=24e9"
    for role in ROLES:
        parser.add_argument(f"--{role}", metavar="FLEET", help=f"{what} (default: this machine, for all roles)")
    parser.add_argument("--origin-up", type=rate, metavar="RATE", help="upload of the origin, as 590Mb: bits a second")
    parser.add_argument("--relay-up", type=rate, metavar="RATE", help="upload of each relay")
    parser.add_argument("--worker-down", type=rate, metavar="RATE", help="download of each worker")
    parser.add_argument(
        "--delta", type=real(0.0001, 1), default=1.0, help="share of a version that travels (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")


def plan(arguments: argparse.Namespace) -> None:
    config = read_config(arguments)
    from shoal import plan as room
    from shoal.launch import cores
    from shoal.plan.memory import largest_parameters
    from shoal.plan.work import COMPUTE_BYTES

    sizes = _sizes(arguments.sizes, config)
    length = arguments.length or max(1, config.sampling.max_tokens // 2)
    work = room.work_of(config, prompt=arguments.prompt, length=length, useful=arguments.useful)
    fleets = _fleets(arguments)
    together = fleets["learner"].device.name == "this"
    compute = COMPUTE_BYTES[arguments.dtype]
    links = room.Links(
        arguments.origin_up, arguments.relay_up, arguments.worker_down, config.relays.count, arguments.delta
    )
    level = config.coordinator.async_level
    found = room.plan(
        sizes,
        work,
        compute,
        level,
        fleets["learner"],
        fleets["workers"],
        fleets["validators"],
        links,
        shares=cores.shares(config, cores.available_cores(config.run.threads)) if together else None,
    )
    device = fleets["learner"].device
    memory = room.memory_of(sizes, work, compute, devices=fleets["learner"].count, cpu=device.cpu)
    largest = {
        "all weights": largest_parameters(device.memory_bytes, fleets["learner"].count),
        "adapters": largest_parameters(device.memory_bytes, fleets["learner"].count, lora=True),
    }
    largest = {} if memory.offloaded else largest  # the formulas are of what stays on the devices
    report = _report(config, work, sizes, found, memory, fleets, largest)
    say(json.dumps(report, indent=2) if arguments.json else "\n".join(_lines(report)))


def rate(text: str) -> float:
    """A type for argparse: bits per second, as 590Mb."""
    if not (match := RATE.fullmatch(text)) or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write it as 590Mb, in bits a second")
    return float(match[1]) * 1000.0 ** "KMGT".index(match[2].upper()) * 1000 if match[2] else float(match[1])


def _sizes(text: str, config: Config) -> Sizes:
    from shoal.model import sources
    from shoal.plan import BUNDLED, sizes_of

    if text:
        return sizes_of(_fields(text), "--sizes")
    if config.model.name in BUNDLED:
        return BUNDLED[config.model.name]
    return sizes_of(sources.read_config(config.model.name, fetch=True), f"config.json of {config.model.name}")


def _fields(text: str) -> dict[str, Any]:
    found = {}
    for name, _, value in (part.partition("=") for part in text.split(",")):
        try:
            found[name] = int(float(value))
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{text!r} is not a list of FIELD=NUMBER") from error
    return found


def _fleets(arguments: argparse.Namespace) -> dict[str, Fleet]:
    given = {role: getattr(arguments, role) for role in ROLES}
    if any(given.values()) and not all(given.values()):
        missing = ", ".join(f"--{role}" for role, text in given.items() if not text)
        raise UsageError(f"name the devices of all three roles, or of none: {missing} is missing")
    from shoal.plan import Fleet, measure

    if not any(given.values()):
        return dict.fromkeys(ROLES, Fleet(measure()))
    return {role: _fleet(text) for role, text in given.items()}


def _fleet(text: str) -> Fleet:
    from shoal.plan import KNOWN, Device, Fleet

    if not (match := FLEET.fullmatch(text)):
        raise UsageError(f"{text!r} is not a fleet: write COUNTxDEVICE@PRICE, as 8xh100@2.5")
    name, count = match["name"], int(match["count"] or 1)
    if not count:
        raise UsageError(f"{text!r}: a fleet has at least 1 device")
    if "=" in name:
        fields = _fields(name)
        if not NEEDED <= set(fields) <= NEEDED | OFFLOADING or min(fields.values()) < 1:
            raise UsageError(
                f"{name!r}: a device has flops, bandwidth and memory, each 1 or more, and for offloading pcie and host"
            )
        device = Device("own", fields["flops"], fields["bandwidth"], fields["memory"])
        links: dict[str, Any] = {f"{field}_Bps": fields[field] for field in OFFLOADING & set(fields)}
        device = replace(device, **links)
    elif name in KNOWN:
        device = KNOWN[name]
    else:
        raise UsageError(f"no device {name!r}: one of {', '.join(KNOWN)}, or flops=...,bandwidth=...,memory=...")
    return Fleet(device, count, float(match["price"] or 0))


def _report(
    config: Config,
    work: Work,
    sizes: Sizes,
    found: Plan,
    memory: Memory,
    fleets: dict[str, Fleet],
    largest: dict[str, float],
) -> dict[str, Any]:
    counts = ONE_MACHINE | {
        "relay": config.relays.count,
        "worker": config.workers.count,
        "validator": config.validator.count,
    }
    devices: dict[str, Device] = {role: fleet.device for role, fleet in fleets.items()}
    together = memory.together(counts) if found.together else None
    this = devices["learner"]
    said = f"this machine, as it is now: {this.flops / 1e9:,.0f} GFLOP/s, {this.bandwidth_Bps / 1e9:.1f} GB/s of memory"
    return {
        "measured": said if found.together else "",
        "parameters": sizes.parameters,
        "prompt_tokens": work.prompt,
        "completion_tokens": work.length,
        "useful": work.trained / work.generated,
        "memory_bytes": memory.roles,
        "offloaded_bytes": memory.offloaded,
        "memory_together_bytes": together,
        "device_memory_bytes": devices["learner"].memory_bytes,
        "does_not_fit": _too_large(memory, devices, together),
        "seconds": found.seconds,
        "step_s": found.step_s,
        "async_level": found.async_level,
        "hiding_level": found.hiding_level,
        "bottleneck": found.bottleneck,
        "busy": {role: found.busy(role) for role in found.seconds},
        "step_cost": found.step_cost,
        "run_steps": config.run.steps,
        "run_s": found.step_s * config.run.steps,
        "run_cost": found.step_cost * config.run.steps,
        "largest_parameters": largest,
    }


def _too_large(memory: Memory, devices: dict[str, Device], together_bytes: float | None) -> list[str]:
    kinds = {"learner": "learner", "workers": "worker", "validators": "validator"}
    found = [kinds[role] for role in ROLES if memory.roles[kinds[role]] > devices[role].memory_bytes]
    return found or ["run as a whole"] * ((together_bytes or 0) > devices["learner"].memory_bytes)


def _lines(report: dict[str, Any]) -> list[str]:
    busy, together = report["busy"], report["memory_together_bytes"]
    lines = [
        *([report["measured"]] if report["measured"] else []),
        f"{report['parameters'] / 1e6:,.0f} million parameters",
        f"prompts of {report['prompt_tokens']} tokens, completions of {report['completion_tokens']}, on average;"
        f" {report['useful']:.0%} of groups teach",
        "(change these with --prompt, --length, --useful)",
    ]
    lines += ["", "memory of a process, GB"]
    lines += [f"  {role:12} {size / 1e9:8.2f}" for role, size in report["memory_bytes"].items()]
    if report["offloaded_bytes"]:
        lines.append(f"  {'on the host':12} {report['offloaded_bytes'] / 1e9:8.2f}  for each device of the learner")
    if together:
        lines.append(f"  {'together':12} {together / 1e9:8.2f}  of {report['device_memory_bytes'] / 1e9:.1f} here")
    lines += [f"  too much: the {what} does not fit" for what in report["does_not_fit"]]
    lines += ["", "seconds a step, and share of the step"]
    lines += [f"  {role:12} {seconds:10,.1f}  {busy[role]:4.0%}" for role, seconds in report["seconds"].items()]
    lines.append(f"  {'step':12} {report['step_s']:10,.1f}  at async level {report['async_level']}")
    lines += ["", f"what sets the pace: {report['bottleneck']}"]
    if not together:
        lines.append(f"async level that hides all but the slowest: {report['hiding_level']}")
    lines.append(f"run: {report['run_steps']} steps, {_duration(report['run_s'])}")
    if report["run_cost"]:
        lines.append(f"cost: {report['step_cost']:.4g} a step, {report['run_cost']:.4g} the run")
    largest = [f"  {what:12} {parameters / 1e9:8,.1f}" for what, parameters in report["largest_parameters"].items()]
    if largest:
        lines += ["largest model that the learner's memory trains, in billions of parameters:", *largest]
    return lines


def _duration(seconds: float) -> str:
    for unit, unit_s in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.1f} {unit}"
    return f"{seconds / 60:.1f} minutes"
