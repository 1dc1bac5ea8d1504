"""The base classes of config sections, and types that several sections use.

A field's docstring is its description, and its type states its bounds. If a default comes from a paper, the description
names the paper in parentheses: INTELLECT-2 (arXiv 2505.07291), Dr. GRPO (2503.20783), DiLoCo (2311.08105), OpenDiLoCo
(2407.07852).
"""

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

LOWEST_TEMPERATURE = 0.01  # far below it, logits divided by the temperature overflow
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=100)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=1e-6, le=1)]
UNBOUNDED = {"stake", "options"}  # fields of `Section` whose numbers have no bounds, or their own
PORTS = "0|[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"


def written_as(form: str, pattern: str) -> AfterValidator:
    """Return a validator that refuses a text unless all of it matches `pattern`. `form`: what the message asks for."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"write {form}")
        return text

    return AfterValidator(check)


def _greedy_or_warm(value: float) -> float:
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"a temperature is 0 (greedy) or at least {LOWEST_TEMPERATURE:g}")
    return value


GreedyOrWarm = AfterValidator(_greedy_or_warm)  # for temperatures that may also be 0


Listen = Annotated[
    str,
    written_as("HOST:PORT, with a port up to 65535", rf"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):({PORTS})"),
]


class Section(BaseModel):
    """A part of a config. It refuses unknown keys and numbers with which nobody can compute, and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _computable(self) -> Self:
        """Refuse numbers so small that dividing by them overflows, and so large that a database cannot hold them."""
        waiting: list[tuple[str, Any]] = [(name, value) for name, value in self if name not in UNBOUNDED]
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, dict | list | tuple):
                waiting += [(name, each) for each in (value.values() if isinstance(value, dict) else value)]
            elif isinstance(value, int | float) and value:
                largest = 2**53 if isinstance(value, int) else 1e38
                if not 1e-9 <= abs(value) <= largest:
                    raise ValueError(f"{name} = {value:g} is not 0, and not between 1e-9 and {largest:g}")
        return self


class Listening(Section):
    """The section of a server."""

    listen: Listen = "127.0.0.1:0"
    """HOST:PORT to listen on; origin and relays also announce it to the pool, unless --url or `origin.url` names another.
    Host 0.0.0.0: all interfaces; it cannot be announced. Port 0: any free port."""

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """0 means any free port."""
        return int(self.listen.rpartition(":")[2])
