"""Takes the source of a reward of one's own into the config, `reward = "my_rewards.py:exact"`.

Invariant: a loaded config holds all source that its rewards name, so the signature on a run's config binds it, and
no other machine needs the file. A function that cannot be there is a ConfigError now, not a grader error later. The
code is parsed, never run.
Called by `loading`. Left out: modules that the file imports; only this one file travels.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from shoal.config.error import ConfigError
from shoal.config.recipe import SourceSection, TaskSection
from shoal.config.sections import Config

LARGEST_BYTES = 1 << 18


def with_files(config: Config) -> Config:
    """The config with `tasks.reward_files` filled in; what a resolved config holds already is kept. Raises ConfigError."""
    files = dict(config.tasks.reward_files)
    for name in own_rewards(config.tasks):
        path, _, function = name.rpartition(":")
        if path not in files:
            files[path] = _read(path, name)
        _check(files[path], path, function, name)
    return config.model_copy(update={"tasks": config.tasks.model_copy(update={"reward_files": files})})


def own_rewards(section: TaskSection) -> list[str]:
    """The rewards that are `file.py:name`, in order."""
    return list(dict.fromkeys(name for source in section.sources for name in reward_names(source) if is_own(name)))


def reward_names(source: SourceSection) -> Iterator[str]:
    yield from source.reward if isinstance(source.reward, dict) else [source.reward]


def is_own(name: str) -> bool:
    return ".py:" in name


def _read(path: str, name: str) -> str:
    file = Path(path).expanduser()
    try:
        source = file.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"reward {name!r}: no file {path} in {Path.cwd()}; start the command where the file is, or give its full path"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward {name!r}: {path} cannot be read as text ({error})") from error
    if len(source) > LARGEST_BYTES:
        raise ConfigError(
            f"reward {name!r}: {path} has {len(source)} characters; at most {LARGEST_BYTES} travel with a run"
        )
    return source


def _check(source: str, path: str, function: str, name: str) -> None:
    try:
        body = ast.parse(source, path).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"reward {name!r}: {path} is not valid Python: {error}; correct the file") from error
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    if function not in functions:
        there = f"it has {', '.join(functions)}" if functions else "it has none"
        raise ConfigError(f"reward {name!r}: {path} has no function {function!r}; {there}")
