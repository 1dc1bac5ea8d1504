"""Every field of every schema that a stranger, a member, a server or a file fills: hostile numbers are refused or harmless.

The schemas are found by introspection, so a new field is tested, too. An accepted number is harmless if

    it is finite, and a database's BIGINT can hold it
    it is not so small that dividing by it overflows, unless the field accepts 0 as well, so that nobody divides by it

For the fields of the config that the sequential tests use, those tests also run on an honest submission.
"""

import json
import math
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from shoal.config import Config, recipe, section, sections, sites, tasks
from shoal.config import config as config_sections
from shoal.config.loading import ConfigError, parse
from shoal.coordinator.trust import DISMISSAL_NATS, bets
from shoal.diloco import messages as site_messages
from shoal.evidence import Process
from shoal.ledger import chain
from shoal.protocol import history, identity, invite, messages
from shoal.serve import proof
from shoal.serve.chat import replies, routes
from shoal.serve.openai import requests
from shoal.shardcast import guard, manifest
from shoal.store import rollouts
from shoal.tasks import taskset

MODULES: tuple[ModuleType, ...] = (
    *(config_sections, recipe, section, sections, sites, tasks),
    *(chain, guard, history, identity, invite, manifest, messages, proof, replies, requests, rollouts, routes),
    *(site_messages, taskset),
)
# Numbers that a later schema judges, whose type is wide by intent, or that nothing reads.
EXEMPT = {
    ("RunDescriptor", "config"),  # becomes a Config
    ("RunOffer", "requirements"),  # becomes a RequirementsSection
    ("RequirementsSection", "stake"),  # a contract's uint256, compared and never stored
    ("SourceSection", "options"),  # of the operator's own generator
    *(("CommonParams", name) for name in ("user", "metadata", "store", "service_tier", "safety_identifier")),
    ("CommonParams", "prompt_cache_key"),
}
HOSTILE: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, -0.0, 5e-324, -5e-324, 1e-300, 1e-40, 1e308, -1e308, -1.0, -1),
    *(2**53, 2**63 - 1, 2**63, 2**80, -(2**63) - 1, True, "", "1", None, (), {}),
)


def shapes(value: Any) -> tuple[Any, ...]:
    return (
        *(value, [value], [value] * 4, {"a": value}, {"http://a": value}, {"worker": value}),
        {"vllm/cpu": {"sampling_margin": value}},
    )


def models() -> Iterator[type[BaseModel]]:
    for module in MODULES:
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__module__ == module.__name__:
                yield kind


def owner(kind: type[BaseModel], name: str) -> str:
    """Return the name of the class that defines the field."""
    return next(base.__name__ for base in kind.__mro__ if name in base.__dict__.get("__annotations__", {}))


FIELDS = [(kind, name) for kind in models() for name in kind.model_fields if (owner(kind, name), name) not in EXEMPT]


@cache
def alone(kind: type[BaseModel], name: str) -> type[BaseModel]:
    """Return a model that has this field alone."""
    info = kind.model_fields[name]
    config = ConfigDict(**{**kind.model_config, "use_attribute_docstrings": False})
    base: dict[str, Any] = {"value": (info.annotation, info)}
    return create_model(f"{kind.__name__}_{name}", __config__=config, **base)


def read(kind: type[BaseModel], name: str, value: Any) -> Any:
    """Return what the field holds after reading `value` from JSON. Raise ValidationError if it is refused."""
    model = alone(kind, name)
    key = model.model_fields["value"].alias or "value"
    return model.model_validate_json(json.dumps({key: value})).value  # type: ignore[attr-defined]


def accepts(kind: type[BaseModel], name: str, value: Any) -> bool:
    try:
        read(kind, name, value)
    except ValidationError:
        return False
    return True


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def check(kind: type[BaseModel], name: str, hostile: Any) -> None:
    """Fail unless every shape of the value is refused or harmless in this field."""
    for shape, with_zero in zip(shapes(hostile), shapes(0), strict=True):
        try:
            value = read(kind, name, shape)
        except ValidationError:
            continue
        where = f"{kind.__module__}.{kind.__name__}.{name} = {shape!r}"
        for number in numbers(value):
            assert math.isfinite(number), f"{where} is not finite"
            assert isinstance(number, float) or -(2**63) <= number < 2**63, f"{where} does not fit a BIGINT"
            if number and abs(number) < 1e-9:
                assert accepts(kind, name, with_zero), f"{where} is too small to divide by"


def in_sections(kind: type[BaseModel], name: str) -> bool:
    return issubclass(kind, section.Section)


@pytest.mark.parametrize("hostile", HOSTILE, ids=repr)
def test_a_hostile_value_is_refused_or_harmless_in_every_field(hostile: Any) -> None:
    for kind, name in FIELDS:
        if not in_sections(kind, name):
            check(kind, name, hostile)


@given(st.sampled_from(FIELDS), st.floats() | st.integers())
def test_any_number_is_refused_or_harmless_in_every_field(field: tuple[type[BaseModel], str], value: float) -> None:
    if not in_sections(*field):
        check(*field, value)


def test_there_are_many_fields_and_every_module_has_some() -> None:
    assert len(FIELDS) > 400 and {kind.__module__ for kind, _ in FIELDS} == {module.__name__ for module in MODULES}


class Unbounded(messages.Message):
    """Fields as they must not be."""

    model_config = ConfigDict(allow_inf_nan=True)
    any_float: float
    any_int: int
    in_a_list: tuple[float, ...]
    in_a_table: dict[str, int]


class Divided(messages.Message):
    temperature: float = messages.Field(gt=0)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (Unbounded, Divided) for name in kind.model_fields]
)
def test_the_check_fails_for_a_field_without_bounds(kind: type[BaseModel], name: str) -> None:
    def fails(hostile: Any) -> bool:
        try:
            check(kind, name, hostile)
        except AssertionError:
            return True
        return False

    assert any(map(fails, HOSTILE))


# --- the config ----------------------------------------------------------------------------------------------------------

SECTIONS = {name: info.annotation for name, info in Config.model_fields.items()}
IN_CONFIG = [
    (name, field)
    for name, kind in SECTIONS.items()
    if isinstance(kind, type) and issubclass(kind, BaseModel)
    for field in kind.model_fields
    if (kind.__name__, field) not in EXEMPT
]
HONEST = messages.ToleranceSpent(
    exposure=100.0, beyond=(5, 1, 0, 0), better=0.0, worse=0.0, easier=0.0, harder=0.0, proof_exponent_mean=1.0,
    proof_mantissa_mean=0.5, logprob_error_mean=0.005, distribution=0.0,
)  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE, ids=repr)
def test_a_hostile_value_is_refused_or_harmless_in_every_field_of_the_config(hostile: Any) -> None:
    for name, field in IN_CONFIG:
        for shape in shapes(hostile):
            try:
                config = parse({name: {field: shape}})
            except ConfigError:
                continue
            where = f"{name}.{field} = {shape!r}"
            for number in numbers(getattr(getattr(config, name), field)):
                assert math.isfinite(number) and (number == 0 or 1e-9 <= abs(number) <= 1e38), where
            if name in ("validator", "evidence"):
                evidence = Process().after(bets(HONEST, config)).evidence
                assert math.isfinite(evidence) and evidence < DISMISSAL_NATS, f"{where} dismisses an honest worker"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"evidence": {"rates": [1e-300, 1e-300, 1e-300, 1e-300]}}, "greater than or equal to 0.000001"),
        ({"evidence": {"rates": [0.1, 0.03, 0.0, 0.0]}}, "greater than or equal to 0.000001"),
        ({"evidence": {"rates": [2.0, 0.03, 0.01, 0.01]}}, "less than or equal to 1"),
        ({"evidence": {"rates": [0.01, 0.03, 0.01, 0.01]}}, "increase"),
        ({"evidence": {"proof_exponent_mean": 5e-324}}, "not between"),
        ({"evidence": {"proof_exponent_mean": 0.01}}, "honest work would be dismissed"),
        ({"sampling": {"temperature": 1e-40}}, "greater than or equal to 0.01"),
        ({"validator": {"check_floor": 1e-320}}, "greater than or equal to 0.000001"),
        ({"validator": {"limits": {"vllm/cpu": {"sampling_margin": 1e-300}}}}, "not between"),
        ({"run": {"steps": 2**63}}, "not between"),
    ],
)
def test_a_number_with_which_nobody_can_compute_is_refused_by_name(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(given)
    [(name, fields)] = given.items()
    assert why in str(refusal.value) and name in str(refusal.value)
    assert next(iter(fields)) in str(refusal.value)


def test_an_accuracy_is_a_fraction() -> None:
    for value in (-0.1, 1.01, 37.0, math.nan):
        with pytest.raises(ValidationError):
            messages.Evaluation(version=1, greedy=value, sampled=None, n=1, final=False)
