"""Adapter for verifiers: lists the tasks of a taskset, and scores one reply to each with the taskset's rewards.

Invariant: a taskset that needs more than one user message and one reply is refused when it is listed. A taskset's
rewards may depend on the machine, so two machines need not agree on a score.
"""

import asyncio
import hashlib
import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.decorators import discover_decorated

taskset: Any = None  # the source's taskset; `prepare` sets it and its version
taskset_version = ""


def rows(options: dict[str, Any]) -> list[dict[str, Any]]:
    setting: dict[str, Any] = {"config": {}, "max_reward": 1.0} | options
    size = setting.pop("size", 1000)
    if unknown := set(setting) - {"environment", "config", "max_reward"}:
        raise ValueError(f"no option {min(unknown)}; there are environment, config, size and max_reward")
    loaded = open_taskset(setting)
    return [row(loaded, task, setting) for _, task in zip(range(size), loaded, strict=False)]


def prepare(setting: str) -> None:
    global taskset, taskset_version
    taskset = open_taskset(json.loads(setting))
    taskset_version = version_of(taskset)


def score(value: dict[str, Any]) -> dict[str, Any]:
    """Return the rewards' score for a reply, as the fields of a grade."""
    if value["version"] != taskset_version:
        raise ValueError(
            f"the task needs {value['version']}, but this machine has {taskset_version}: install the same version"
        )
    kind = taskset.task_type()
    task = kind(kind.data_type().model_validate(value["entry"]), taskset.config.task)
    nodes = [vf.MessageNode(parent=n - 1 if n else None, message=part) for n, part in enumerate(messages_of(task))]
    reply = vf.AssistantMessage(content=value["completion"])
    nodes.append(vf.MessageNode(parent=len(nodes) - 1, sampled=True, message=reply))
    trace_task, agent = vf.TraceTask(type=kind.__name__, data=task.data), vf.AgentInfo(config=vf.AgentConfig())
    trace = vf.Trace(task=trace_task, agent=agent, nodes=nodes, is_completed=True, ok=True)
    asyncio.run(task.score(trace))
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    score = trace.reward / value["setting"]["max_reward"]
    if len(parts) != len(trace.rewards) or not 0 <= score <= 1:  # also refuses NaN
        raise ValueError(
            f"the score {score} of {parts} is not within [0, 1]: set options.max_reward to the largest sum of the rewards"
        )
    return {"score": score, "parts": parts}


def messages_of(task: Any) -> list[Any]:
    prompt = task.data.prompt
    before = [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
    return before + ([vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or []))


def row(loaded: Any, task: Any, setting: dict[str, Any]) -> dict[str, Any]:
    if more := obstacle(loaded, task):
        raise ValueError(f"task {task.data.idx} needs more than a question and one reply: {more}")
    entry, parts = task.data.model_dump(mode="json"), messages_of(task)
    metadata = {"generator": "verifiers", "version": version_of(loaded), "setting": setting, "entry": entry}
    answer = str(getattr(task.data, "answer", ""))
    return {"question": "\n\n".join(part.content for part in parts), "answer": answer, "metadata": json.dumps(metadata)}


def open_taskset(setting: dict[str, Any]) -> Any:
    name, config = setting.get("environment"), setting["config"]
    if "system_prompt" in config or '"fn":' in json.dumps(config):
        raise ValueError("options.config names a file or a function on this machine")
    try:
        return vf.load_taskset(vf.taskset_config_type(name).model_validate(config | {"id": name}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"environment {name} does not load: {error}") from error


def version_of(loaded: Any) -> str:
    """Return the library's version and a digest of the environment's source, which may be edited in place."""
    file = Path(inspect.getfile(type(loaded)))
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return f"verifiers {version('verifiers')}, source {digest}"


def obstacle(loaded: Any, task: Any) -> str:
    """Return what a task needs beyond one reply to one message; empty if nothing."""
    kind, name, rewards = loaded.task_type(), loaded.config.id, task.hooks("reward")
    parts = messages_of(task)
    alone = vf.environment_class(name) is vf.SingleAgentEnv and vf.default_harness_id(name) != name
    container = kind.NEEDS_CONTAINER or task.data.image or task.data.workdir
    container = container or any(getattr(kind, step) is not getattr(vf.Task, step) for step in ("setup", "finalize"))
    needs = {
        "episodes or a harness of its own": not alone,
        "a sandbox": container or any("runtime" in inspect.signature(hook).parameters for hook in rewards),
        "tools": loaded.toolsets(loaded.config) or kind.toolsets(loaded.config.task),
        "hooks between turns": [
            hook for name in ("stop", "intercept", "tool") for hook in discover_decorated(task, name)
        ],
        "a judge model": task.config.judges,
        "a reward": not rewards,
        "a prompt other than one user message": [part.role for part in parts] not in (["user"], ["system", "user"]),
        "images or other content that is not text": not all(isinstance(part.content, str) for part in parts),
        "state besides its data and config": set(vars(task)) != {"data", "config"},
    }
    return ", ".join(need for need, applies in needs.items() if applies)
