"""The generator `arithmetic`: small sums and differences, a verifiable task for a small model and a short run.

Invariant: a sum's text does not depend on the other options, so a sum held out in one run (by a hash of its text) is held
out in every run with as many held-out tasks. Called by `sources`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from shoal.tasks.task import TasksNotFoundError


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    operand_min: int = 0
    operand_max: int = 29
    operations: list[Literal["+", "-"]] = ["+"]

    @model_validator(mode="after")
    def _consistent(self) -> "Options":
        if not 0 <= self.operand_min <= self.operand_max:
            raise ValueError("operand_min must be at least 0 and must not exceed operand_max")
        return self


def arithmetic(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Every sum of two operands. Raises TasksNotFoundError for unknown or impossible options."""
    try:
        asked = Options.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise TasksNotFoundError(
            f"options of generator arithmetic: {name} {first['msg'].removeprefix('Value error, ')}".replace(":  ", ": ")
        ) from error
    operands = range(asked.operand_min, asked.operand_max + 1)
    return [
        {"question": f"{a} {operation} {b}", "answer": str(a + b if operation == "+" else a - b), "reward": "number"}
        for operation in dict.fromkeys(asked.operations)
        for a in operands
        for b in operands
    ]
