"""`shoal check [CONFIG]`: will it run here, how long, how much memory and disk, and what to do? One line for each answer.

Invariant: nothing is started or changed. Exit status 0: nothing fails, 1: something does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, add_command, read_config, say, takes_config

if TYPE_CHECKING:
    from shoal.cli.preflight.machine import Finding
    from shoal.config import Config

PROMPT = 64  # tokens, where the model's tokenizer is not on this machine
TOO_LARGE = "lower learner.row_tokens, set learner.activation_checkpointing = true, or use a smaller model"


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands, "check", "will a run work here, how long, how much memory and disk, what to do?", "quickstart"
    )
    takes_config(parser, required=False)
    parser.add_argument("--dir", type=Path, default=Path(), help="where the run's folder will be (default: here)")
    parser.add_argument("--json", action="store_true", help="facts and findings as JSON")


def check(arguments: argparse.Namespace) -> int:
    config = read_config(arguments) if arguments.config else None
    from shoal.cli.preflight import machine

    facts = machine.gather(arguments.dir, config.model.device if config else "cpu")
    findings = machine.examine(facts)
    if config and not facts.torch_error and not facts.device_error:
        findings += of_config(config, arguments.dir)
    if arguments.json:
        say(json.dumps({"findings": [asdict(one) for one in findings], "facts": asdict(facts)}, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        say("\n".join(one.line(width) for one in findings))
    return int(any(one.verdict == "fails" for one in findings))


def of_config(config: Config, folder: Path) -> Iterator[Finding]:
    """What would stop a run of this config here; if nothing does, its time, memory and disk."""
    from shoal import tasks
    from shoal.cli.preflight import disk, estimate
    from shoal.cli.preflight.cores import available_cores
    from shoal.cli.preflight.machine import fails, ok
    from shoal.cli.preflight.problems import local_folder, problems
    from shoal.cli.preflight.speed import measure
    from shoal.model import dtype
    from shoal.model.load import load_tokenizer
    from shoal.tasks.prompt import ChatTemplateError

    notes: list[str] = []
    stops = problems(config, notes)
    yield from (ok("tasks", note) for note in notes)
    for stop in stops:
        what, _, remedy = stop.partition("; ")
        yield fails("config", what, remedy or "change the config")
    if stops:
        return
    held, prompt = local_folder(config.model.name), PROMPT
    if held is not None and (held / "config.json").is_file():
        try:
            heldout = tasks.load(config.tasks).heldout[: estimate.SAMPLE]
            prompt = estimate.mean_prompt(load_tokenizer(held), config, heldout)
        except ChatTemplateError as error:
            yield fails("config", *str(error).split("; ", 1))
            return
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    measured = {"dtype": picked, "prompt_tokens": prompt, "machine": measure(picked, config.model.device)}
    found = estimate.of_measured(config, measured, available_cores(config.run.threads))
    if isinstance(found, str):
        yield ok("time", found)
        return
    yield ok("time", found.time())
    if found.memory_bytes > found.machine_bytes:
        yield fails("memory", found.memory(), TOO_LARGE)
    else:
        yield ok("memory", found.memory())
    needs, free = disk.needs(config, estimate.model_sizes(config.model.name).parameters), disk.free_bytes(folder)
    if free < needs.peak_bytes + disk.RESERVE_BYTES:
        yield fails(
            "disk", disk.said(needs, free), "free space, choose another --out, or keep less (learner.keep_last)"
        )
    else:
        yield ok("disk", disk.said(needs, free))
