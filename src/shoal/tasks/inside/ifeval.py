"""Which instructions of an IFEval task a completion follows: what the children of the reward `instructions` compute.

`check` raises what the library raises.
Invariant: language detection is seeded, so an answer follows from its value alone.
"""

from typing import Any

import langdetect
from lm_eval.tasks.ifeval.utils import process_results


def prepare() -> None:
    """Seeds language detection, and loads its profiles before the first fork."""
    langdetect.DetectorFactory.seed = 0
    langdetect.detect("the first call loads the profiles of all languages")


def check(value: dict[str, Any]) -> dict[str, Any]:
    """`{"strict": bool, "loose": bool, "broken": [instruction, ...]}`."""
    metadata = value["metadata"]
    row = {
        "key": metadata.get("key", 0),
        "instruction_id_list": metadata["instruction_id_list"],
        "prompt": value["prompt"],
        "kwargs": metadata["kwargs"],
    }
    followed = process_results(row, [value["completion"]])
    each = zip(metadata["instruction_id_list"], followed["inst_level_strict_acc"], strict=True)
    return {
        "strict": bool(followed["prompt_level_strict_acc"]),
        "loose": bool(followed["prompt_level_loose_acc"]),
        "broken": [name for name, kept in each if not kept],
    }
