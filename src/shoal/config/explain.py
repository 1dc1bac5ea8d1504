"""Every field of a config with its description, type, default and source: `shoal config --explain`.

Invariant: all of it is read from the models, so text and code cannot disagree.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from shoal.config.config import Config
from shoal.config.loading import ConfigError, nearest, section_of
from shoal.config.section import Section

OWN = "Shoal"
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Field:
    key: str  # with its sections, as in learner.loss.beta
    description: str
    type: str
    default: str
    source: str  # of the default


def fields(key: str = "") -> list[Field]:
    """All fields, those of the section `key`, or the one field `key`. Raises ConfigError for an unknown key."""
    at: type[Section] | None = Config
    known: list[str] = []
    for part in key.split(".") if key else []:
        if at is None or part not in at.model_fields:
            hint = f"{'.'.join(known)} is a field" if at is None else nearest([*known, part])
            raise ConfigError(f"unknown key {key!r}; {hint}")
        known.append(part)
        at = section_of(at.model_fields[part].annotation)
    return [field for field in _fields(Config, "") if not key or field.key == key or field.key.startswith(f"{key}.")]


def text(found: list[Field]) -> str:
    """A paragraph per field, for a terminal."""
    return "\n\n".join(
        f"{each.key}\n    {each.description}\n    type {each.type}; default {each.default}; source: {each.source}"
        for each in found
    )


def _fields(section: type[Section], prefix: str) -> Iterator[Field]:
    """Yield the fields of this section, then those of the sections in it."""
    inner = {key: found for key, info in section.model_fields.items() if (found := section_of(info.annotation))}
    for key, info in section.model_fields.items():
        if key not in inner or info.default is None:
            yield _field(f"{prefix}{key}", info)
    for key, found in inner.items():
        yield from _fields(found, f"{prefix}{key}.")


def _field(key: str, info: FieldInfo) -> Field:
    extra = info.json_schema_extra
    source = str(extra["source"]) if isinstance(extra, dict) else OWN
    limits = [_limit(rule) for rule in info.metadata]
    kind = ", ".join([_type(info.annotation), *filter(None, limits)])
    return Field(key, info.description or "", kind, _value(info.default), source)


def _type(annotation: Any) -> str:
    arguments = get_args(annotation)
    if section_of(annotation) is not None:
        return "section or none"
    if get_origin(annotation) is dict:
        return "table"
    if get_origin(annotation) is UnionType:
        return " or ".join(_type(each) for each in arguments if each is not type(None)) + (
            " or none" if type(None) in arguments else ""
        )
    if get_origin(annotation) is Literal:
        return " or ".join(json.dumps(each) for each in arguments)
    if get_origin(annotation) is list:
        return (
            f"list of ({_type(arguments[0])})" if len(get_args(arguments[0])) > 2 else f"list of {_type(arguments[0])}"
        )
    if get_origin(annotation) is tuple:
        return f"{len(arguments)} × {_type(arguments[0])}"
    if hasattr(annotation, "__metadata__"):  # Annotated: its constraints are Field(...)
        rules = [_limit(rule) for info in annotation.__metadata__ for rule in getattr(info, "metadata", [])]
        return " ".join([_type(annotation.__origin__), *filter(None, rules)])
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _limit(rule: Any) -> str:
    found = [f"{word} {getattr(rule, name):g}" for name, word in LIMITS.items() if hasattr(rule, name)]
    return found[0] if found else ""


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
