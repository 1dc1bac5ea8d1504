"""verifiers' side of the adapter: lists the tasks of a taskset, and scores one reply to each with the taskset's rewards.

Played here: one user message, one reply. Invariant: a taskset that needs more is refused when it is listed. What its
rewards do is the environment's: they may read the machine, so no two machines need agree on a score.
"""

import asyncio
import hashlib
import inspect
import itertools
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.decorators import discover_decorated

taskset: Any = None  # of the source, set by `prepare`
made_of = ""


class RefusedError(Exception):
    """For the person who wrote the config; the message is shown as it is."""


def rows(options: dict[str, Any]) -> list[dict[str, Any]]:
    setting: dict[str, Any] = {"config": {}, "max_reward": 1.0} | options
    size = setting.pop("size", None)
    if unknown := set(setting) - {"environment", "config", "max_reward"}:
        raise RefusedError(f"no option {min(unknown)}; there are environment, config, size and max_reward")
    loaded, name = open_taskset(setting), setting["environment"]
    if size is None and not loaded.bounded:
        raise RefusedError(f"environment {name} has tasks without end: give options.size")
    tasks = list(itertools.islice(loaded, size))
    if more := obstacle(loaded, tasks[0]):
        raise RefusedError(f"environment {name} is more than questions with one reply each: {more}")
    return [row(loaded, task, setting) for task in tasks]


def prepare(setting: str) -> None:
    global taskset, made_of
    taskset = open_taskset(json.loads(setting))
    made_of = made_by(taskset)


def score(value: dict[str, Any]) -> dict[str, Any]:
    """Return what the rewards give for a reply, as the fields of a grade."""
    if value["version"] != made_of:
        raise ValueError(f"the task is of {value['version']}, this machine has {made_of}: install the same")
    kind = taskset.task_type()
    task = kind(kind.data_type().model_validate(value["entry"]), taskset.config.task)
    messages = [*messages_of(task), vf.AssistantMessage(content=value["completion"])]
    nodes = [
        vf.MessageNode(parent=n - 1 if n else None, sampled=part is messages[-1], message=part, timestamp=0.0)
        for n, part in enumerate(messages)
    ]
    told = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=told, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True, ok=True)
    asyncio.run(task.score(trace))
    parts = {name: given.score for name, given in trace.rewards.items() if given is not None}
    points = trace.reward / value["setting"]["max_reward"]
    if len(parts) != len(trace.rewards) or not 0 <= points <= 1:  # not for NaN either
        raise ValueError(f"{points}, from {parts}, is not within [0, 1]: set options.max_reward to the most they give")
    return {"score": points, "parts": parts}


def messages_of(task: Any) -> list[Any]:
    prompt = task.data.prompt
    before = [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
    return before + ([vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or []))


def row(loaded: Any, task: Any, setting: dict[str, Any]) -> dict[str, Any]:
    entry, parts = json.loads(task.data.model_dump_json()), messages_of(task)
    roles = [part.role for part in parts]
    if roles not in (["user"], ["system", "user"]) or not all(isinstance(part.content, str) for part in parts):
        raise RefusedError(
            f"task {task.data.idx}: its prompt is not one message of text ({', '.join(roles) or 'none'})"
        )
    if set(vars(task)) != {"data", "config"} or loaded.task_type().data_type().model_validate(entry) != task.data:
        raise RefusedError(f"task {task.data.idx} is more than its data: it cannot be rebuilt elsewhere")
    metadata = {"generator": "verifiers", "version": made_by(loaded), "setting": setting, "entry": entry}
    question = "\n\n".join(part.content for part in parts)
    return {"question": question, "answer": str(getattr(task.data, "answer", "")), "metadata": json.dumps(metadata)}


def open_taskset(setting: dict[str, Any]) -> Any:
    name, config = setting.get("environment"), setting["config"]
    if "system_prompt" in config or '"fn":' in json.dumps(config):
        raise RefusedError("options.config names a file or a function of this machine")
    try:
        return vf.load_taskset(vf.taskset_config_type(name).model_validate(config | {"id": name}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RefusedError(f"environment {name} does not load in {sys.executable}: {reason}") from error


def made_by(loaded: Any) -> str:
    """Return the library's version and a digest of the environment's source, which may be edited in place."""
    file = Path(inspect.getfile(type(loaded)))
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return f"verifiers {version('verifiers')}, source {digest}"


def obstacle(loaded: Any, task: Any) -> str:
    """Return what a taskset needs beyond a reply; empty if nothing."""
    kind, single = loaded.task_type(), vf.environment_class(loaded.config.id) is vf.SingleAgentEnv
    hooks = {hook for name in ("stop", "intercept", "tool") for hook in discover_decorated(task, name)}
    needs = {
        "episodes or a harness of its own": not single or vf.default_harness_id(loaded.config.id) == loaded.config.id,
        "a container": kind.NEEDS_CONTAINER or any(getattr(task.data, name) for name in ("image", "workdir")),
        "tools": loaded.toolsets(loaded.config) or kind.toolsets(loaded.config.task),
        "hooks between turns": hooks,
        "a sandbox": any("runtime" in inspect.signature(hook).parameters for hook in task.hooks("reward"))
        or any(getattr(kind, step) is not getattr(vf.Task, step) for step in ("setup", "finalize")),
        "a judge model": task.config.judges,
        "a reward": not task.hooks("reward"),
    }
    return ", ".join(name for name, needed in needs.items() if needed)
