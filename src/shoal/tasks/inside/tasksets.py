"""verifiers' side of the adapter: lists the tasks of a taskset, and scores one reply to each with the taskset's rewards.

Played here: one user message, one reply, no tools, no sandbox. Invariant: a taskset that needs more is refused when it is
listed; a reward that turns out to need the network, a program or a judge model is an error, whatever it returns.
"""

import asyncio
import hashlib
import inspect
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils.decorators import discover_decorated

VERSION = version("verifiers")
OPTIONS = {"environment", "config", "size", "max_reward"}
# What a reward does when it asks somebody else: a model, a sandbox, a program.
OUTSIDE = dict.fromkeys(("socket.connect", "socket.getaddrinfo", "socket.sendto"), "the network")
OUTSIDE |= dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"), "another program")

taskset: Any = None  # of the source, set by `prepare`
made_of = ""
asked: list[str] = []  # what the watched code asked for outside
watching = False


class RefusedError(Exception):
    """For the person who wrote the config; the message is shown as it is."""


def rows(options: dict[str, Any]) -> list[dict[str, Any]]:
    if unknown := set(options) - OPTIONS:
        raise RefusedError(f"no option {min(unknown)}; there are {', '.join(sorted(OPTIONS))}")
    setting = {"environment": options.get("environment"), "config": options.get("config", {})}
    setting["max_reward"] = options.get("max_reward", 1.0)
    size = options.get("size")
    if size is not None and not (type(size) is int and size > 0):
        raise RefusedError("options.size must be a positive integer")
    loaded = open_taskset(setting)
    name = setting["environment"]
    if size is None and not loaded.bounded:
        raise RefusedError(f"environment {name} has tasks without end: give options.size")
    tasks = list(itertools.islice(loaded, size))
    if reasons := [*obstacles(loaded), *(reason for task in tasks[:1] for reason in of_rewards(task, setting))]:
        raise RefusedError(f"environment {name} cannot be used: {'; '.join(reasons)}")
    made = made_by(loaded)
    return [row(loaded, task, setting, made) for task in tasks]


def prepare(text: str) -> None:
    global taskset, made_of
    sys.addaudithook(watch)
    taskset = open_taskset(json.loads(text))
    made_of = made_by(taskset)


def score(value: dict[str, Any]) -> dict[str, Any]:
    """Return what the rewards give for a reply, as the fields of a grade."""
    if value["version"] != made_of:
        raise ValueError(f"the task is of {value['version']}, this machine has {made_of}: install the same")
    if not value["completion"].strip():
        return {"score": 0.0, "outcome": "wrong_format", "detail": "the completion is empty"}
    trace = scored(taskset, value["entry"], value["completion"])
    parts = {name: given.score for name, given in trace.rewards.items() if given is not None}
    points = trace.reward / value["setting"]["max_reward"]
    if len(parts) != len(trace.rewards) or not (math.isfinite(points) and 0 <= points <= 1):
        given = ", ".join(f"{name} {reward}" for name, reward in trace.rewards.items())
        raise ValueError(f"{points}, from {given}, is not within [0, 1]: set options.max_reward to the most they give")
    detail = ", ".join(f"{name} {points:g}" for name, points in parts.items())
    return {"score": points, "outcome": "graded", "detail": detail, "parts": parts}


def scored(loaded: Any, data: dict[str, Any], completion: str) -> Any:
    """Return the trace of one reply after its task's rewards."""
    global watching
    task = rebuilt(loaded, data)
    messages: list[Any] = [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
    messages += [vf.UserMessage(content=task.data.prompt)] if isinstance(task.data.prompt, str) else task.data.prompt
    messages.append(vf.AssistantMessage(content=completion))
    last = len(messages) - 1
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=n - 1 if n else None, sampled=n == last, message=message, timestamp=0.0)
            for n, message in enumerate(messages)
        ],
        is_completed=True,
        ok=True,
    )
    loop = asyncio.new_event_loop()
    asked.clear()
    watching = True
    try:
        loop.run_until_complete(task.score(trace))
    finally:
        watching = False
        loop.close()
        if asked:
            raise RuntimeError(f"a reward asks for {asked[0]}: such an environment cannot be used here")
    if trace.extra_usage or "judge_calls" in trace.info:
        raise RuntimeError("a reward asks a judge model: such an environment cannot be used here")
    return trace


def watch(event: str, _: object) -> None:
    if watching and event in OUTSIDE:
        asked.append(f"{OUTSIDE[event]} ({event})")
        raise PermissionError(f"{event} is not allowed in a reward")


def row(loaded: Any, task: Any, setting: dict[str, Any], made: str) -> dict[str, Any]:
    name, data = setting["environment"], task.data
    if isinstance(data.prompt, str):
        parts = [data.prompt]
    else:
        parts = [message.content for message in data.prompt or []]
        roles = [message.role for message in data.prompt or []]
        if roles not in (["user"], ["system", "user"]) or not all(isinstance(part, str) for part in parts):
            raise RefusedError(
                f"environment {name}, task {data.idx}: its prompt is not one message of text ({', '.join(roles) or 'none'})"
            )
    for field in ("image", "workdir", "skills", "artifacts"):
        if getattr(data, field):
            raise RefusedError(f"environment {name}, task {data.idx} needs a sandbox (its `{field}` is set)")
    entry = json.loads(data.model_dump_json())
    if (
        type(task) is not loaded.task_type()
        or set(vars(task)) != {"data", "config"}
        or task.config != loaded.config.task
    ):
        raise RefusedError(f"environment {name}, task {data.idx} is more than its data: it cannot be rebuilt elsewhere")
    if rebuilt(loaded, entry).data != data:
        raise RefusedError(f"environment {name}, task {data.idx}: its data is not the same after a way through JSON")
    answer = getattr(data, "answer", "")
    return {
        "question": "\n\n".join([*([data.system_prompt] if data.system_prompt else []), *parts]),
        "answer": str(answer) if isinstance(answer, str | int | float) else "",
        "metadata": json.dumps({"generator": "verifiers", "version": made, "setting": setting, "entry": entry}),
    }


def rebuilt(loaded: Any, data: dict[str, Any]) -> Any:
    kind = loaded.task_type()
    return kind(kind.data_type().model_validate(data), loaded.config.task)


def open_taskset(setting: dict[str, Any]) -> Any:
    name, config, max_reward = setting["environment"], setting["config"], setting["max_reward"]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.@/-]+", name):
        raise RefusedError(f"options.environment is {name!r}; it must be the name of an installed environment")
    if not (type(max_reward) in (int, float) and 0 < max_reward < math.inf):
        raise RefusedError("options.max_reward must be a positive number")
    if "system_prompt" in config:
        raise RefusedError("options.config.system_prompt names a file of this machine: use tasks.system")
    hooks = [hook for kind in config.get("task", {}).values() if isinstance(kind, dict) for hook in kind.values()]
    if any(isinstance(hook, dict) and "fn" in hook for hook in hooks):
        raise RefusedError("options.config names functions to call: rewards must be the environment's own")
    try:
        return vf.load_taskset(vf.taskset_config_type(name).model_validate(config | {"id": name}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        text = f"{error.errors()[0]['loc']} {error.errors()[0]['msg']}" if isinstance(error, ValidationError) else error
        raise RefusedError(f"environment {name} does not load in {sys.executable}: {text}") from error


def made_by(loaded: Any) -> str:
    """Versions of library and environment, and a digest of the environment's source, which may be edited in place."""
    module = sys.modules[type(loaded).__module__]
    file = Path(inspect.getfile(module))
    files = sorted(file.parent.rglob("*.py")) if hasattr(module, "__path__") else [file]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(file.parent)}\n".encode() + path.read_bytes())
    top = module.__name__.partition(".")[0]
    try:
        installed = version(packages_distributions().get(top, [top])[0])
    except PackageNotFoundError:
        installed = "without a version"
    return f"verifiers {VERSION}, {top} {installed}, source {digest.hexdigest()[:16]}"


def obstacles(loaded: Any) -> Iterator[str]:
    """Yield why a taskset is more than questions with one reply each."""
    name, kind = loaded.config.id, loaded.task_type()
    env = vf.environment_class(name)
    if env is not vf.SingleAgentEnv:
        yield f"its episodes are played by {env.__name__}, with further turns or agents"
    if vf.default_harness_id(name) == name:
        yield "it brings a program (harness) of its own that the model works in"
    if kind.NEEDS_CONTAINER:
        yield f"{kind.__name__} needs a container"
    if loaded.toolsets(loaded.config) or kind.toolsets(loaded.config.task):
        yield "it gives the model tools"
    for step in ("setup", "finalize", "stage_verifier"):
        if getattr(kind, step) is not getattr(vf.Task, step):
            yield f"{kind.__name__}.{step} works in a sandbox"


def of_rewards(task: Any, setting: dict[str, Any]) -> Iterator[str]:
    """Yield why a task's rewards cannot be had from a reply alone."""
    rewards = task.hooks("reward")
    if not rewards and not task.config.judges:
        yield "it has no reward"
    for hook in rewards:
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            yield f"reward {hook.__name__} needs a sandbox (`runtime`)"
    for kind in ("stop", "intercept", "tool"):
        if hooks := [*(task.hooks(kind) if kind == "stop" else discover_decorated(task, kind))]:
            yield f"it acts between the turns of a conversation (@vf.{kind} {hooks[0].__name__})"
    weight = sum(max(0.0, getattr(hook, "_vf_weight", 1.0)) for hook in rewards)
    if weight > setting["max_reward"] + 1e-9:
        yield f"its rewards weigh {weight:g} together: set options.max_reward = {weight:g}"
