"""What every section of a config is, and a bound that several share. Called by the modules that define sections."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Strict: unknown keys, infinities and later changes are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
