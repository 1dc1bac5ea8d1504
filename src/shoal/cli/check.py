"""Commands to use before a run: `shoal check`, `shoal config`, `shoal calibrate`.

`shoal check [CONFIG]` prints one line per finding: whether a run works here, how much memory and disk it needs, and what to
do about a problem. Invariant: it starts and changes nothing. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import config as config_module
from shoal.cli.arguments import Commands, add_command, add_config, read_config, read_optional_config, say, whole
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.cli.preflight.machine import CheckLine
    from shoal.config import Config

PROMPT = 64  # assumed length in tokens, if the model is not on this machine


def add_commands(commands: Commands) -> None:
    what = "check whether a run works here, and estimate its memory and disk"
    parser = add_command(commands, "check", check, what, "quickstart")
    add_config(parser, required=False)
    parser.add_argument("--dir", type=Path, default=Path(), help="where the run's folder would be (default: here)")

    what = "print the resolved values of a config, or explain its fields"
    parser = add_command(commands, "config", config, what, "--explain learner.lr")
    add_config(parser, required=False)
    which = "describe one field, the fields of a section, or all fields"
    parser.add_argument("--explain", nargs="?", const="", metavar="KEY", help=which)

    what = "measure honest work on this machine, and derive the validator's limits from it"
    parser = add_command(commands, "calibrate", calibrate, what, "quickstart --out calibration")
    add_config(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("calibration"), help="folder for limits.toml, measured.json and the work")
    each = "submissions for each combination of dtype, batch size and threads (default: 8)"
    add("--submissions", type=whole(1, 100_000), default=8, help=each)
    versions = "folders of the policy versions to measure with (default: the config's model)"
    add("--weights", type=Path, nargs="+", default=[], help=versions)
    work = "--out folders of `shoal calibrate` from other machines: judge their work, too"
    add("--work", type=Path, nargs="+", default=[], metavar="FOLDER", help=work)
    devices = "devices of workers and validators, each with each (default: the config's model.device)"
    add("--devices", nargs="+", default=[], metavar="DEVICE", help=devices)


def check(arguments: argparse.Namespace) -> int:
    config = read_optional_config(arguments)
    from shoal.cli.preflight.machine import examine

    findings = list(examine(arguments.dir, config.model.device if config else "cpu"))
    if config and not any(finding.level == "fails" for finding in findings):
        own = list(of_config(config, arguments.dir))
        if any(finding.name == "disk" for finding in own):  # it replaces the general one
            findings = [finding for finding in findings if finding.name != "disk"]
        findings += own
    say("\n".join(finding.line() for finding in findings))
    return int(any(finding.level == "fails" for finding in findings))


def of_config(config: Config, folder: Path) -> Iterator[CheckLine]:
    """Yield each problem that would stop this run here. If there is none, yield estimates of its memory and disk."""
    from shoal.cli.launch.prepare import check_length, check_model, check_packages, load_tasks
    from shoal.cli.preflight import estimate
    from shoal.cli.preflight.machine import disk_finding, disk_needs, fails, free_bytes, free_memory, memory_bytes, ok
    from shoal.model import dtype, sources

    if (config.sft.data or config.pretrain.data) and "sources" not in config.tasks.model_fields_set:
        yield training_data(config)
        return
    name, prompt, problems = config.model.name, PROMPT, []
    for find in (check_packages, partial(check_length, fetch=True)):
        try:
            find(config)
        except UserError as error:
            problems.append(str(error))
    try:
        loaded = load_tasks(config)
        yield from (ok("tasks", note) for note in loaded.notes)
        yield ok("tasks", f"rewards and environments passed a trial; tasks.digest = {loaded.digest}")
        # check only a model that is on this machine; the hub's cache is not searched
        is_bundled, is_folder = name in sources.BUNDLED_FOLDERS, name.startswith((".", "/", "~"))
        model = sources.bundled_dir(name) if is_bundled else sources.resolve(name) if is_folder else None
        if model is not None and (model / "config.json").is_file():
            prompt, _ = check_model(config, model, loaded)
    except UserError as error:
        problems.append(str(error))
    for problem in dict.fromkeys(problems):
        what, _, remedy = problem.partition("; ")
        yield fails("config", what, remedy or "change the config")
    if problems:
        return
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    yield estimate.memory_finding(estimate.needed_bytes(config, picked, prompt), memory_bytes(), free_memory())
    try:
        needs = disk_needs(config, estimate.model_sizes(name).parameters)
    except estimate.SizesError:
        return  # the finding about memory gives the reason
    yield disk_finding(needs, free_bytes(folder))


def training_data(config: Config) -> CheckLine:
    """Return whether the files of `shoal sft` or `shoal pretrain` are there. Data on the hub is not fetched."""
    from shoal.cli.preflight.machine import fails, ok
    from shoal.learner.pretrain.text import HUB, Corpus
    from shoal.learner.sft import conversations

    data = config.sft.data or config.pretrain.data
    if conversations.on_hub(data) if config.sft.data else HUB.fullmatch(data):
        return ok("config", "valid; its data is on the Hugging Face hub and was not looked for")
    try:
        conversations.find(data) if config.sft.data else Corpus(data)
    except UserError as error:
        what, _, remedy = str(error).partition("; ")
        return fails("config", what, remedy or f"correct {'sft' if config.sft.data else 'pretrain'}.data")
    return ok("config", "valid, and its data is there; the memory and disk of training are not estimated")


def config(arguments: argparse.Namespace) -> None:
    if arguments.config and arguments.explain is not None:
        raise UserError("--explain describes fields and their defaults: leave the config out")
    if arguments.explain is not None:
        say(config_module.explain(arguments.explain))
    else:
        say(config_module.dumps(read_optional_config(arguments) or config_module.Config()).rstrip("\n"))


def calibrate(arguments: argparse.Namespace) -> None:
    settings = read_config(arguments)
    from shoal.cli.calibrate import calibrate as measure
    from shoal.cli.launch.prepare import check_length

    check_length(settings)
    measure(settings, arguments.out, arguments.submissions, arguments.weights, arguments.devices, arguments.work, say)
