"""Reads a config: a TOML file, files laid over it, and `section.key=value` overrides, checked as one `Config`.

Unknown keys are refused with the nearest known name. Every error is a `ConfigError` that names the key.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from shoal.config.sections import Config
from shoal.errors import ShoalError


class ConfigError(ShoalError):
    """A config that cannot be used; the message names the key and the next step."""


def load(path: Path, overrides: list[str] | None = None, overlays: list[Path] | None = None) -> Config:
    """Read a TOML file, lay others over it (calibrated limits, say), apply `section.key=value` overrides.

    Raises ConfigError.
    """
    values = _read(path)
    for overlay in overlays or []:
        _lay_over(values, _read(overlay))
    for override in overrides or []:
        _apply(values, override)
    return parse(values, source=" and ".join(map(str, [path, *(overlays or [])])))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        known = sorted(str(p) for p in Path("configs").glob("*.toml"))
        raise ConfigError(f"no config at {path}" + (f"; there are {', '.join(known)}" if known else "")) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not readable as TOML: {error}") from error


def _lay_over(values: dict[str, Any], above: dict[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _lay_over(values[name], value)
        else:
            values[name] = value


def parse(values: dict[str, Any], source: str = "config") -> Config:
    """A Config from plain values. Raises ConfigError that names the key, and the nearest known one if it is unknown."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_explain(e) for e in error.errors())) from error


def dumps(config: Config) -> str:
    """The whole config as TOML, defaults included; TOML has no word for none, so what is none is left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, field = key.strip().split(".")
    if not equals or not sections or not field:
        raise ConfigError(f"--set {override!r}: write it as section.key=value, e.g. learner.lr=1e-5")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    at = values
    for section in sections:
        at = at.setdefault(section, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
    at[field] = value


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{'.'.join(path)}: {message}" if path else message
    section: Any = Config
    for part in path[:-1]:
        section = section.model_fields[part].annotation
    near = difflib.get_close_matches(path[-1], section.model_fields, n=1, cutoff=0.5)
    hint = f"did you mean {'.'.join([*path[:-1], near[0]])!r}?" if near else f"known: {', '.join(section.model_fields)}"
    return f"unknown key {'.'.join(path)!r}; {hint}"
