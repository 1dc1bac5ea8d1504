"""What every section of a config is, and the bounds that several share.

A field's docstring is its description; its bounds are in its type. A default that is not Shoal's own names its source:
INTELLECT-2 (arXiv 2505.07291), Dr. GRPO (2503.20783), DiLoCo (2311.08105), OpenDiLoCo (2407.07852).
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """Strict: unknown keys, infinities and later changes are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
