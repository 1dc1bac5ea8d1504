"""What can one, two or three colluding validators of three gain or break, alone or with a worker? Fail if it changes.

    python -m benchmarks.trust.matrix --out benchmarks/results/matrix.json

Each cell is one run of a real `Pool` in virtual time: a database on disk, signed opinions, signed files in a store,
eight steps. Alice and Bob are honest, and so are the validators that do not collude. The friend is a worker in league
with the colluders, which claim work before anybody else does. There is no model: the benchmark knows which files are
false, and honest validators sign the truth. After the run the real audit checks ledger and files. `recomputation` stands for
an audit that judges files again with the run's weights. It contradicts a false hard rejection, and a false acceptance
or reward in a submission that it draws (tests/cli/audit/test_proofs.py does so with a model).

One accepted submission in 32 gets a second opinion, at random. So that eight steps show it, every DRAWN-th one gets it
here. `lies_until_found` measures with the real draw how long a friend is paid for lies. EXPECTED holds every cell.
"""

import argparse
import logging
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.common.machine import about, save
from benchmarks.trust.colluders import (
    ALICE,
    FRIEND,
    HONEST,
    MAX_TOKENS,
    SIZE,
    VALIDATORS,
    WORKERS,
    Attack,
    Cell,
    Said,
    Scene,
)
from shoal.protocol.messages import LARGEST, Reason, Replay, ToleranceSpent

LIVES, MAX_LIES = 20, 300  # runs of `lies_until_found`, and steps in each
EXTREME = ToleranceSpent(
    exposure=0.0,
    beyond=(LARGEST, LARGEST, LARGEST, LARGEST),
    better=1e6,
    worse=1e6,
    easier=1e6,
    harder=1e6,
    proof_exponent_mean=1e12,
    proof_mantissa_mean=1e12,
    logprob_error_mean=1e12,
    distribution=1e6,
    improved=LARGEST,
    spoiled=LARGEST,
)
LIE, INEXACT = Said(Reason.PROOF), Said(Reason.INEXACT, Replay(tokens=9, mismatched=9))
ATTACKS = {
    "false hard rejections": Attack(LIE),
    "false hard rejections, late": Attack(LIE, when="late"),
    "false hard rejections after the last step": Attack(LIE, when="at the end"),
    "false soft rejections": Attack(Said(Reason.BOUNDS)),
    "rejections as unrepeatable": Attack(Said(Reason.UNREPEATABLE)),
    "rejections as spending": Attack(Said(Reason.SPENDING)),
    "rejections as inexact": Attack(INEXACT, in_class=(*WORKERS, *VALIDATORS)),
    "rejections as inexact, with the worker's fingerprint": Attack(INEXACT, in_class=(ALICE,)),
    "extreme replay figures": Attack(Said(replay=Replay(tokens=LARGEST, mismatched=LARGEST))),
    "extreme spent figures": Attack(Said(spent=EXTREME)),
    "plausible spent figures": Attack(Said(spent=HONEST.model_copy(update={"beyond": (4, 4, 4, 4)}))),
    "fewer groups than the file": Attack(Said(groups=0)),
    "more tokens than the file": Attack(Said(tokens=MAX_TOKENS * SIZE), FRIEND),
    "useful groups called useless": Attack(Said(useful=False)),
    "useless groups called useful": Attack(Said(useful=True), FRIEND, flat=True),
    "false rewards in the accepted file": Attack(Said(reward=1.0)),
    "garbage as accepted file": Attack(Said(stores="garbage")),
    "no accepted file": Attack(Said(stores="nothing")),
    "false acceptance": Attack(Said(), FRIEND, truth=Reason.PROOF),
    "false acceptance, with the friend's fingerprint": Attack(Said(), FRIEND, truth=Reason.PROOF, in_class=(FRIEND,)),
    "silence about lies": Attack(None, FRIEND, claims=False, truth=Reason.PROOF),
    "silence": Attack(None, claims=False),
    "leases held": Attack(None),
    "repeated verdicts": Attack(LIE, repeats=(LIE, LIE)),
    "contradicting verdicts": Attack(Said(), repeats=(LIE, INEXACT)),
    "opinions on another submission": Attack(replace(LIE, about="submission")),
    "opinions on another file": Attack(replace(LIE, about="file")),
}


# --- the matrix ------------------------------------------------------------------------------------------------------

EXPECTED = {  # by number of colluders: 1, 2, 3
    "false hard rejections": (
        "honest paid; found by second opinion",
        "honest slashed; found by recomputation",
        "honest slashed; found by recomputation",
    ),
    "false hard rejections, late": (
        "honest paid; found by second opinion",
        "honest slashed; found by coordinator, recomputation",
        "honest slashed, stalls; found by coordinator, recomputation",
    ),
    "false hard rejections after the last step": (
        "honest paid; found by second opinion",
        "honest slashed; found by recomputation",
        "honest slashed; found by recomputation",
    ),
    "false soft rejections": (
        "honest paid; found by second opinion",
        "honest suspended; found by nobody",
        "honest suspended; found by nobody",
    ),
    "rejections as unrepeatable": (
        "honest paid; found by second opinion",
        "honest unpaid; found by nobody",
        "honest unpaid; found by nobody",
    ),
    "rejections as spending": (
        "honest paid; found by coordinator",
        "honest waits, stalls; found by coordinator",
        "honest waits, stalls; found by coordinator",
    ),
    "rejections as inexact": (
        "honest paid; found by second opinion",
        "honest suspended; found by nobody",
        "honest suspended; found by nobody",
    ),
    "rejections as inexact, with the worker's fingerprint": (
        "honest unpaid, stalls; found by coordinator",
        "honest suspended; found by nobody",
        "honest suspended; found by nobody",
    ),
    "extreme replay figures": (
        "honest paid; found by coordinator",
        "honest waits, stalls; found by coordinator",
        "honest waits, stalls; found by coordinator",
    ),
    "extreme spent figures": (
        "honest paid; found by nobody",
        "honest dismissed; found by nobody",
        "honest dismissed; found by nobody",
    ),
    "plausible spent figures": (
        "honest paid; found by nobody",
        "honest dismissed; found by nobody",
        "honest dismissed; found by nobody",
    ),
    "fewer groups than the file": (
        "honest paid less; found by audit",
        "honest paid less; found by audit",
        "honest paid less; found by audit",
    ),
    "more tokens than the file": (
        "honest paid, friend enriched; found by second opinion, audit",
        "honest paid, friend enriched; found by audit",
        "honest paid, friend enriched; found by audit",
    ),
    "useful groups called useless": (
        "honest paid; found by nobody",
        "honest paid; found by nobody",
        "honest paid; found by nobody",
    ),
    "useless groups called useful": (
        "honest paid, friend not enriched, trained on it; found by audit",
        "honest paid, friend not enriched, trained on it; found by audit",
        "honest paid, friend not enriched, trained on it; found by audit",
    ),
    "false rewards in the accepted file": (
        "honest paid, trained on it; found by recomputation",
        "honest paid, trained on it; found by recomputation",
        "honest paid, trained on it; found by recomputation",
    ),
    "garbage as accepted file": (
        "honest paid; found by audit",
        "honest paid; found by audit",
        "honest paid; found by audit",
    ),
    "no accepted file": (
        "honest paid; found by coordinator",
        "honest waits, stalls; found by coordinator",
        "honest waits, stalls; found by coordinator",
    ),
    "false acceptance": (
        "honest paid, friend slashed; found by second opinion, recomputation",
        "honest paid, friend enriched, trained on it; found by recomputation",
        "honest paid, friend enriched, trained on it; found by recomputation",
    ),
    "false acceptance, with the friend's fingerprint": (
        "honest paid, friend slashed; found by second opinion, recomputation",
        "honest paid, friend enriched, trained on it; found by recomputation",
        "honest paid, friend enriched, trained on it; found by recomputation",
    ),
    "silence about lies": (
        "honest paid, friend slashed; found by nobody",
        "honest paid, friend not enriched, stalls; found by nobody",
        "honest waits, friend not enriched, stalls; found by nobody",
    ),
    "silence": (
        "honest paid; found by nobody",
        "honest paid, stalls; found by nobody",
        "honest waits, stalls; found by nobody",
    ),
    "leases held": (
        "honest paid; found by nobody",
        "honest waits, stalls; found by nobody",
        "honest waits, stalls; found by nobody",
    ),
    "repeated verdicts": (
        "honest paid; found by second opinion",
        "honest slashed; found by recomputation",
        "honest slashed; found by recomputation",
    ),
    "contradicting verdicts": (
        "honest paid; found by nobody",
        "honest paid; found by nobody",
        "honest paid; found by nobody",
    ),
    "opinions on another submission": (
        "honest paid; found by coordinator",
        "honest waits, stalls; found by coordinator",
        "honest waits, stalls; found by coordinator",
    ),
    "opinions on another file": (
        "honest paid; found by coordinator",
        "honest waits, stalls; found by coordinator",
        "honest waits, stalls; found by coordinator",
    ),
}


def cell(attack: Attack, colluders: int) -> Cell:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), attack, colluders)
        scene.run()
        return scene.cell()


def lies_until_found(seed: int) -> dict[str, int]:
    """Let one colluder of three give the first opinion on all lies of a friend, with the real draw of second opinions.

    Return how many lies were accepted until the friend was slashed, and how many of these were paid.
    """
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), ATTACKS["false acceptance"], 1, MAX_LIES)
        scene.pool.checkers.random = Random(seed).random
        scene.run(until=lambda: scene.gain() == "slashed")
        rows = scene.database.rows("SELECT state, credit FROM submissions WHERE worker = ?", FRIEND.public)
        found = scene.gain() == "slashed"
        scene.database.sqlite.close()
    accepted = sum(state == "accepted" for state, _ in rows)
    return {"found": int(found), "accepted": accepted, "paid": sum(credit == "credited" for _, credit in rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    cells = {name: [str(cell(attack, n)) for n in (1, 2, 3)] for name, attack in ATTACKS.items()}
    wrong = [name for name in ATTACKS if tuple(cells[name]) != EXPECTED[name]]
    lives = [lies_until_found(seed) for seed in range(LIVES)]
    accepted, paid = ([life[what] for life in lives] for what in ("accepted", "paid"))
    figures = {
        "found": sum(life["found"] for life in lives),
        **{"accepted_mean": statistics.mean(accepted), "accepted_max": max(accepted)},
        **{"paid_mean": statistics.mean(paid), "paid_max": max(paid), "runs": LIVES},
    }
    save(arguments.out, {**about(), "cells": cells, "attacks": len(cells), "wrong": wrong, "lies_until_found": figures})
    for name, outcomes in cells.items():
        sys.stdout.write("\n    ".join([name, *outcomes]) + "\n")
    sys.stdout.write(f"lies until found: {figures}\n")
    sys.stdout.write("".join(f"NOT AS EXPECTED: {name}: {EXPECTED[name]}\n" for name in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
