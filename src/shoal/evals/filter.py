"""The offline filter: from pass rates to the tasks worth training on. `passrates.parquet` and `manifest.json`.

A task is kept if its pass rate lies in the band, ends included, and no completion of it had a grader error. A config names
the manifest as `keep` of a source.
Invariant: both files follow from the results and the band alone, so another band needs no new completions.
Called by `shoal filter`. Paper: INTELLECT-2 (arXiv 2505.07291), offline filtering: pass@8 of 12.5 % to 50 %.
"""

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.evals.passrates import FilterError, Result
from shoal.files import write_file
from shoal.protocol.messages import MILLION

FORMAT = "shoal-filter-1"
RATES, MANIFEST = "passrates.parquet", "manifest.json"
MOST_BINS = 16


@dataclass(frozen=True)
class Band:
    """Pass rates from `low` to `high`, both included."""

    low: Fraction
    high: Fraction

    @classmethod
    def parse(cls, text: str) -> "Band":
        """Of `0.125:0.5` or `1/8:1/2`. Raises ValueError."""
        parts = text.split(":")
        try:
            low, high = (Fraction(part) for part in parts)
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{text!r} is not a band of pass rates: write LOW:HIGH, as in 0.125:0.5") from error
        if not 0 <= low <= high <= 1:
            raise ValueError(f"{text!r} is not a band of pass rates: 0 <= LOW <= HIGH <= 1 must hold")
        return cls(low, high)

    def holds(self, result: Result) -> bool:
        return not result.grader_error and self.low <= Fraction(result.score, result.n * MILLION) <= self.high


def write_filter(out: Path, results: Sequence[Result], band: Band, settings: Mapping[str, Any]) -> list[Result]:
    """Write both files. Returns the results of the kept tasks. Raises FilterError if there are none, OSError."""
    write_rates(out / RATES, results)
    kept = [result for result in results if band.holds(result)]
    if not kept:
        (out / MANIFEST).unlink(missing_ok=True)  # of another band
        found = ", ".join(f"{label}: {count}" for label, count in histogram(results).items() if count)
        raise FilterError(
            f"no task of {len(results)} has a pass rate from {float(band.low):g} to {float(band.high):g}; tasks by pass "
            f"rate: {found}; choose another --band (the completions in {out} are kept), other tasks, or another model"
        )
    manifest = {
        "format": FORMAT,
        **settings,
        "band": [float(band.low), float(band.high)],
        "counts": counts(results, kept, band),
        "kept": [result.task for result in kept],
    }
    write_file(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return kept


def counts(results: Sequence[Result], kept: Sequence[Result], band: Band) -> dict[str, Any]:
    failed = sum(result.grader_error > 0 for result in results)
    below = sum(not result.grader_error and Fraction(result.score, result.n * MILLION) < band.low for result in results)
    all_of, kept_of = Counter(one.source for one in results), Counter(one.source for one in kept)
    return {
        "tasks": len(results),
        "kept": len(kept),
        "below": below,
        "above": len(results) - len(kept) - below - failed,
        "grader_error": failed,
        "sources": {source: {"tasks": all_of[source], "kept": kept_of[source]} for source in all_of},
    }


def histogram(results: Sequence[Result]) -> dict[str, int]:
    """Tasks by pass rate: by completions right if there are few, else by tenths. Empty bins included.

    A task with partial scores counts in the nearest bin.
    """
    k = max((result.n for result in results), default=1)
    if k <= MOST_BINS:
        found = Counter(round(Fraction(one.score * k, one.n * MILLION)) for one in results)
        return {f"{right}/{k}": found[right] for right in range(k + 1)}
    found = Counter(min(int(Fraction(one.score * 10, one.n * MILLION)), 9) for one in results)
    return {f"{low / 10:.1f} to {(low + 1) / 10:.1f}": found[low] for low in range(10)}


def write_rates(path: Path, results: Sequence[Result]) -> None:
    """One row per task. Raises OSError."""
    table = pa.table(
        {
            "task": pa.array([one.task for one in results], pa.string()),
            "source": pa.array([one.source for one in results], pa.string()),
            "n": pa.array([one.n for one in results], pa.int32()),
            "score_sum": pa.array([one.score / MILLION for one in results], pa.float64()),
            "pass_rate": pa.array([one.pass_rate for one in results], pa.float64()),
            "length_mean": pa.array([one.tokens / one.n for one in results], pa.float64()),
            "graded": pa.array([one.graded for one in results], pa.int32()),
            "wrong_format": pa.array([one.wrong_format for one in results], pa.int32()),
            "grader_error": pa.array([one.grader_error for one in results], pa.int32()),
        }
    )
    data = io.BytesIO()
    pq.write_table(table, data)
    write_file(path, data.getvalue())
