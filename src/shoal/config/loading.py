"""Load, write and explain configs. A config is a TOML file, overlays on it, and `section.key=value` overrides.

If a config file does not exist, `NAME`, `NAME.toml` and `configs/NAME.toml` mean the packaged config of that name.

Invariant: an unknown key is refused with a suggestion, and a `ConfigError` names all faults at once.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import ValidationError

from shoal.config.config import Config
from shoal.config.section import Section
from shoal.errors import UserError, user_path

BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
# A run's files, and its workers' submissions, depend on these fields.
FIXED = re.compile(
    r"model\.name$|run\.seed$|coordinator\.prompts_per_step$|learner\.lora\.|sampling\.|tasks\.(?!sandbox\.)"
)
PACKAGED = Path(__file__).parent.parent / "configs"  # in a checkout, a link to the top folder `configs`


class ConfigError(UserError):
    """The config cannot be used. The message names the key, and says what to do."""


def load(path: Path, overrides: list[str] | None = None, overlays: list[Path] | None = None) -> Config:
    """Read a TOML file, then apply overlays (for example, calibrated limits), then `section.key=value` overrides.

    Raise ConfigError.
    """
    path = find(path)
    values: dict[str, Any] = {}
    for file in [path, *(overlays or [])]:
        _merge(values, _resolved(_read(file), file.parent))
    for override in overrides or []:
        _override(values, override)
    changes = [*map(str, overlays or []), *(f"--set {override}" for override in overrides or [])]
    return parse(values, source=" and ".join([str(path), *changes]))


def find(path: Path) -> Path:
    """Return `path`; if it does not exist but names a packaged config, return the packaged config's path."""
    packaged = PACKAGED / f"{path.stem}.toml"
    is_name = path in (Path(path.stem), Path(f"{path.stem}.toml"), Path("configs", f"{path.stem}.toml"))
    return packaged if is_name and not path.is_file() and packaged.is_file() else path


def parse(values: dict[str, Any], source: str = "config") -> Config:
    """Make a Config from plain values. Raise ConfigError, naming every faulty key.

    Sections are checked against each other only if each is valid by itself.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        faults = dict.fromkeys(_message(fault) for fault in error.errors())
        raise ConfigError(f"{source}: " + "; ".join(faults)) from None


def dumps(config: Config) -> str:
    """Return the whole config as TOML, including defaults. TOML has no null, so fields that are None are omitted."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def check_resumed(before: str, config: Config) -> list[str]:
    """Describe each field that differs from the run's config `before`, in TOML. Raise ConfigError if it may not differ."""
    old, new, default = (dict(_flat(tomllib.loads(text))) for text in (before, dumps(config), dumps(Config())))
    changes = []
    for key in field_paths(Config):
        was, now = old.get(key, default.get(key)), new.get(key)
        if was != now:
            was, now = ("unset" if value is None else json.dumps(value) for value in (was, now))
            if FIXED.match(key):
                raise ConfigError(
                    f"{key} is {now:.200}, but the work of this run so far was done with {was:.200}: set it back, or start "
                    "a new run"
                )
            changes.append(f"{key} from {was:.200} to {now:.200}")
    return changes


def explain(key: str = "") -> str:
    """Describe every field, the fields of the section `key`, or the field `key`, with types and defaults.

    Raise ConfigError for an unknown key.
    """
    section: type[Section] | None = Config
    parts = key.split(".") if key else []
    for number, part in enumerate(parts):
        if section is None or part not in section.model_fields:
            hint = suggestion(parts[: number + 1]) if section else f"{'.'.join(parts[:number])} is a field"
            raise ConfigError(f"unknown key {key!r}; {hint}")
        section = section_of(section.model_fields[part].annotation)
    return "\n\n".join(text for path, text in _paragraphs(Config, "") if not key or f"{path}.".startswith(f"{key}."))


def _paragraphs(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the paths and texts of this section's fields, then those of the sections in it."""
    inner = {name: section_of(info.annotation) for name, info in section.model_fields.items()}
    for name, schema in section.model_json_schema()["properties"].items():
        if not inner[name] or section.model_fields[name].default is None:
            what, default = " ".join(schema["description"].split()), json.dumps(schema.get("default"))
            yield f"{prefix}{name}", f"{prefix}{name}\n    {what}\n    {_type(schema)}; default {default}"
    for name, inner_section in inner.items():
        if inner_section:
            yield from _paragraphs(inner_section, f"{prefix}{name}.")


def _type(schema: dict[str, Any]) -> str:
    """Describe the type and bounds of a JSON schema."""
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    type_ = f"list of {_type(schema['items'])}" if "items" in schema else schema.get("type", "section")
    return ", ".join([type_, *(f"{words} {schema[bound]:g}" for bound, words in BOUNDS.items() if bound in schema)])


def suggestion(path: list[str]) -> str:
    """Suggest a replacement for an unknown key: the same name in another section, a similar name, or all names."""
    if elsewhere := [name for name in field_paths(Config) if name.rpartition(".")[2] == path[-1]]:
        return f"did you mean {' or '.join(map(repr, elsewhere[:3]))}?"
    section: Any = Config
    for part in path[:-1]:
        section = section_of(section.model_fields[part].annotation)
    if similar := difflib.get_close_matches(path[-1], section.model_fields, n=1, cutoff=0.5):
        return f"did you mean {'.'.join([*path[:-1], similar[0]])!r}?"
    return f"known: {', '.join(section.model_fields)}"


def field_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the path of every field."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        yield f"{prefix}{name}"
        if inner is not None:
            yield from field_paths(inner, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class in a field's type: alone, optional or in a list; None for a plain value."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((option for option in options if isinstance(option, type) and issubclass(option, Section)), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError as error:
        existing = sorted(str(file) for file in Path("configs").glob("*.toml"))
        existing += sorted(file.stem for file in PACKAGED.glob("*.toml"))
        raise ConfigError(f"no config at {path}; available: {', '.join(existing)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; name a config file, or resume a run with --resume") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not readable as TOML: {error}") from error


def _resolved(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the file names of task sources: relative to the current folder, or else to the config's `folder`."""
    tasks = values.get("tasks")
    sources = tasks.get("sources") if isinstance(tasks, dict) else None
    for source in sources if isinstance(sources, list) else []:
        for key in ("path", "keep", "reward", "environment") if isinstance(source, dict) else ():
            if source.get(key):
                source[key] = _resolved_name(key, source[key], folder)
    return values


def _resolved_name(key: str, value: Any, folder: Path) -> Any:
    if isinstance(value, dict):  # rewards with weights
        return {_resolved_name(key, name, folder): weight for name, weight in value.items()}
    is_code = key in ("reward", "environment")  # file.py:name, or the name of a built-in
    if not isinstance(value, str) or (is_code and ".py:" not in value):
        return value
    file, colon, function = value.rpartition(":") if is_code else (value, "", "")
    if user_path(file).exists() or not (folder / file).exists():
        return value
    return f"{folder / file}{colon}{function}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every field. A list is one value."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _merge(values: dict[str, Any], overlay: dict[str, Any]) -> None:
    for name, value in overlay.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, field = key.strip().split(".")
    if not equals or not sections or not field or sections[0].isdecimal():
        raise ConfigError(f"--set {override!r}: write it as section.key=value, e.g. learner.lr=1e-5")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    if isinstance(value, int | float | date) and not isinstance(value, bool) and _is_text([*sections, field]):
        value = text.strip()
    target: Any = values
    for section in sections:
        target = _entry(target, section, override) if isinstance(target, list) else target.setdefault(section, {})
        if not isinstance(target, dict | list):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
    if isinstance(target, list):
        raise ConfigError(f"--set {override!r}: name an entry of the list, e.g. {'.'.join(sections)}.0.{field}")
    target[field] = value


def _is_text(path: list[str]) -> bool:
    """Return whether the field holds only text, so that a number in an override is text too."""
    section: Any = Config
    *sections, field = path
    for part in sections:
        if part.isdecimal():  # an entry of a list
            continue
        section = section_of(section.model_fields[part].annotation) if part in section.model_fields else None
        if section is None:
            return False
    return field in section.model_fields and section.model_fields[field].annotation is str


def _entry(entries: list[Any], number: str, override: str) -> Any:
    """Return an entry of a list of sections by its index."""
    if not number.isdecimal() or int(number) >= len(entries):
        raise ConfigError(f"--set {override!r}: {number!r} is not an index below {len(entries)}, the list's length")
    return entries[int(number)]


def _message(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] != "extra_forbidden":
        message = cast(str, error["msg"]).removeprefix("Value error, ")
        if not path:
            return message
        if message.startswith("Input should") and isinstance(error["input"], str | int | float):
            message += f", not {error['input']!r:.60}"
        return f"{'.'.join(path)}: {message}"
    names = [part for part in path if not part.isdecimal()]  # without list indices
    return f"unknown key {'.'.join(path)!r}; {suggestion(names)}"
