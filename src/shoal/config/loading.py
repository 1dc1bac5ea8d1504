"""Reads a config: a TOML file, overlays, and `section.key=value` overrides, checked as one `Config`; writes and explains it.

A config is found by its path. Where there is no such file, `NAME`, `NAME.toml` and `configs/NAME.toml` mean the packaged
config of that name.

Invariant: unknown keys are refused with the name that was probably meant, and a `ConfigError` names all faults at once.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import ValidationError

from shoal.config.config import Config
from shoal.config.section import Section
from shoal.errors import UserError

BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
PACKAGED = Path(__file__).parent.parent / "configs"  # in a checkout: a link to the folder of that name


class ConfigError(UserError):
    """A config that cannot be used. The message names the key and the next step."""


def load(path: Path, overrides: list[str] | None = None, overlays: list[Path] | None = None) -> Config:
    """Read a TOML file, then apply overlays (calibrated limits, for example), then `section.key=value` overrides.

    Raises ConfigError.
    """
    path = find(path)
    values = _read(path)
    _find_beside(values, path.parent)
    for overlay in overlays or []:
        above = _read(overlay)
        _find_beside(above, overlay.parent)
        _overlay(values, above)
    for override in overrides or []:
        _override(values, override)
    changes = [*map(str, overlays or []), *(f"--set {override}" for override in overrides or [])]
    return parse(values, source=" and ".join([str(path), *changes]))


def find(path: Path) -> Path:
    """The file that `path` means: itself if it exists, else the packaged config of that name, else itself again."""
    packaged = PACKAGED / f"{path.stem}.toml"
    named = path in (Path(path.stem), Path(f"{path.stem}.toml"), Path("configs", f"{path.stem}.toml"))
    return packaged if named and not path.is_file() and packaged.is_file() else path


def parse(values: dict[str, Any], source: str = "config") -> Config:
    """A Config from plain values. Raises ConfigError, which names every faulty key.

    Sections are checked against each other once each is right by itself.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        faults = dict.fromkeys(_message(fault) for fault in error.errors())
        raise ConfigError(f"{source}: " + "; ".join(faults)) from None


def dumps(config: Config) -> str:
    """The whole config as TOML, defaults included. TOML has no null, so a field without a value is left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def explain(key: str = "") -> str:
    """Every field, those of the section `key`, or the field `key`, each with its description, type and default.

    All of it is read from the models. Raises ConfigError for an unknown key.
    """
    at: type[Section] | None = Config
    known: list[str] = []
    for part in key.split(".") if key else []:
        if at is None or part not in at.model_fields:
            hint = f"{'.'.join(known)} is a field" if at is None else nearest([*known, part])
            raise ConfigError(f"unknown key {key!r}; {hint}")
        known.append(part)
        at = section_of(at.model_fields[part].annotation)
    paragraphs = {
        path: text for path, text in _paragraphs(Config, "") if f"{path}.".startswith(f"{key}." if key else "")
    }
    return "\n\n".join(paragraphs.values())


def _paragraphs(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the paths and texts of this section's fields, then those of the sections in it."""
    inner = {name: found for name, info in section.model_fields.items() if (found := section_of(info.annotation))}
    for name, schema in section.model_json_schema()["properties"].items():
        if name not in inner or section.model_fields[name].default is None:
            what, default = " ".join(schema["description"].split()), json.dumps(schema.get("default"))
            yield f"{prefix}{name}", f"{prefix}{name}\n    {what}\n    {_kind(schema)}; default {default}"
    for name, found in inner.items():
        yield from _paragraphs(found, f"{prefix}{name}.")


def _kind(schema: dict[str, Any]) -> str:
    """The type and bounds in a JSON schema, in words."""
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = f"list of {_kind(schema['items'])}" if "items" in schema else schema.get("type", "section")
    return ", ".join([kind, *(f"{words} {schema[bound]:g}" for bound, words in BOUNDS.items() if bound in schema)])


def nearest(path: list[str]) -> str:
    """Return what to write in place of an unknown key: the right section, the closest name, or all names."""
    if homes := [name for name in field_paths(Config) if name.rpartition(".")[2] == path[-1]]:
        return f"did you mean {' or '.join(map(repr, homes[:3]))}?"
    section: Any = Config
    for part in path[:-1]:
        section = section_of(section.model_fields[part].annotation)
    near = difflib.get_close_matches(path[-1], section.model_fields, n=1, cutoff=0.5)
    if near:
        return f"did you mean {'.'.join([*path[:-1], near[0]])!r}?"
    return f"known: {', '.join(section.model_fields)}"


def field_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the path of every field."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        yield f"{prefix}{name}"
        if inner is not None:
            yield from field_paths(inner, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone, optional or in a list; None for a plain value."""
    options = [annotation, *getattr(annotation, "__args__", ())]  # of a list: the section of its entries
    return next((option for option in options if isinstance(option, type) and issubclass(option, Section)), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        known = [
            *sorted(str(p) for p in Path("configs").glob("*.toml")),
            *sorted(p.stem for p in PACKAGED.glob("*.toml")),
        ]
        raise ConfigError(f"no config at {path}; there are {', '.join(known)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; name a config, or a run to resume with --resume") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not readable as TOML: {error}") from error


def _find_beside(values: dict[str, Any], folder: Path) -> None:
    """Files of task sources are relative to the current folder; those that are not there are found beside the config."""
    tasks = values.get("tasks")
    sources = tasks.get("sources") if isinstance(tasks, dict) else None
    for source in sources if isinstance(sources, list) else []:
        for key in ("path", "keep", "reward", "environment") if isinstance(source, dict) else ():
            if source.get(key):
                source[key] = _beside(key, source[key], folder)


def _beside(key: str, value: Any, folder: Path) -> Any:
    if isinstance(value, dict):  # rewards with weights
        return {_beside(key, name, folder): weight for name, weight in value.items()}
    named = key in ("reward", "environment")  # file.py:name, or a name alone
    if not isinstance(value, str) or (named and ".py:" not in value):
        return value
    file, colon, function = value.rpartition(":") if named else (value, "", "")
    if Path(file).expanduser().exists() or not (folder / file).exists():
        return value
    return f"{folder / file}{colon}{function}"


def _overlay(values: dict[str, Any], above: dict[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _overlay(values[name], value)
        else:
            values[name] = value


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, field = key.strip().split(".")
    if not equals or not sections or not field:
        raise ConfigError(f"--set {override!r}: write it as section.key=value, e.g. learner.lr=1e-5")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    at: Any = values
    for section in sections:
        at = _entry(at, section, override) if isinstance(at, list) else at.setdefault(section, {})
        if not isinstance(at, dict | list):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
    if isinstance(at, list):
        raise ConfigError(f"--set {override!r}: name a field of one entry, e.g. {'.'.join(sections)}.0.{field}")
    at[field] = value


def _entry(entries: list[Any], number: str, override: str) -> Any:
    """An entry of a list of sections, by its number from 0."""
    if not number.isdecimal() or int(number) >= len(entries):
        raise ConfigError(f"--set {override!r}: {number!r} is not an entry of a list of {len(entries)}, counted from 0")
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
    named = [part for part in path if not part.isdecimal()]  # without numbers in lists
    return f"unknown key {'.'.join(path)!r}; {nearest(named)}"
