"""What every section of a config is, the bound that several share, and where a default may be from.

Every field has a description; a section's is its docstring. A default that is not Shoal's own names its source.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

Decay = Annotated[float, Field(ge=0, lt=1)]

# Where a default is from; a field without a source has Shoal's own default.
PAPER: JsonDict = {"source": "INTELLECT-2 (arXiv 2505.07291)"}
MEASURED: JsonDict = {"source": "measured by `shoal calibrate`, see docs/trust.md"}
DR_GRPO: JsonDict = {"source": "Dr. GRPO (arXiv 2503.20783)"}
DILOCO: JsonDict = {"source": "DiLoCo (arXiv 2311.08105)"}
OPENDILOCO: JsonDict = {"source": "OpenDiLoCo (arXiv 2407.07852)"}


class Section(BaseModel):
    """Strict: unknown keys, infinities and later changes are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
