"""Compare a validator's speed with a plain forward of the same tokens and with generating them.

    python -m benchmarks.speed.validation_speed [configs/quickstart.toml] [--rounds 5] [--long 200] [--rows 1 16 64]

Runs on one thread. For each shape, the four computations below take turns. Figures are medians over the rounds. "Tokens"
are completion tokens throughout.

    validator   every check of opened submissions: the forward, noise and evidence of every token, proofs, rewards
    plain       transformers' forward of each prompt and completion, right-padded, logits of all positions
    packed      the validator's forward and the logits; the rest of `validator` is the checks
    generation  `TorchEngine`, completions of a fixed length

The shapes are several submissions of the config's size at once, and completions of `--long` tokens. It also measures what
share of a worker's time its proofs take. Writes every timing to benchmarks/results/validation_speed.json.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import RESULTS, ROOT, about, save
from shoal import config
from shoal.cli.calibrate import RUN
from shoal.config import Config
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model.dtype import DtypeName, pick
from shoal.model.sources import resolve
from shoal.protocol.identity import Identity
from shoal.tasks.derive import GroupPlan
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.checks import ANSWERS, EXPENSIVE, FILE, endings
from shoal.validator.judge import Judge
from shoal.validator.prefill import VOCABULARY_ROWS, hidden_states
from shoal.validator.service import BATCH
from shoal.worker.produce import Producer

PLAIN_ROWS = (4, 8, 16, 32, 64)  # batch sizes tried for the plain forward; the fastest one counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "quickstart.toml")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=200, help="tokens of the completions of fixed length")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="sequences generated together")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = config.load(arguments.config)
    dtype, gflops = pick("auto")
    result: dict[str, Any] = {
        **about(),
        "model": settings.model.name,
        "dtype": dtype,
        "one_thread_gflops": {name: round(speed, 1) for name, speed in gflops.items()},
        "shapes": {},
    }
    engine = TorchEngine(dtype)
    shapes = {"as configured": lambda: as_configured(settings, dtype, engine, arguments.rounds)}
    for rows in arguments.rows:
        shapes[f"{rows} of {arguments.long} tokens"] = lambda rows=rows: long_completions(
            settings, dtype, engine, rows, arguments.long, arguments.rounds
        )
    for shape, measure in shapes.items():
        result["shapes"][shape] = measure()
        say(shape, result["shapes"][shape])
        save(RESULTS / "validation_speed.json", result)


def as_configured(settings: Config, dtype: DtypeName, engine: TorchEngine, rounds: int) -> dict[str, Any]:
    """Measure submissions of the config's own size, as many at once as the validator takes."""
    judge, producer = ready(settings, dtype, engine)
    with judge:
        cases = [made(judge, producer, number) for number in range(BATCH)]

        def examine() -> None:
            if findings := [one.finding for one in judge.examine(cases) if one.finding]:
                raise SystemExit(f"honest work was rejected: {findings}")

        return compare(judge, cases, examine, rounds) | worker_shares(producer)


def long_completions(
    settings: Config, dtype: DtypeName, engine: TorchEngine, rows: int, length: int, rounds: int
) -> dict[str, Any]:
    """Measure `rows` completions of exactly `length` tokens. End tokens do not end them."""
    size = min(rows, settings.sampling.group_size)
    sampling = settings.sampling.model_copy(update={"max_tokens": length, "group_size": size})
    workers = settings.workers.model_copy(update={"groups_per_submission": rows // size})
    judge, producer = ready(
        settings.model_copy(update={"sampling": sampling, "workers": workers}), dtype, engine, ends=()
    )
    with judge:
        case = made(judge, producer, 0)
        rules = judge.rules

        def examine() -> None:  # as `Judge.examine`, without the check that an end token ends each completion
            assert rules is not None
            outcomes = [check(rules, case) for check in FILE if check is not endings]
            graded = judge.grade(case)
            outcomes += [check(rules, graded) for check in ANSWERS]
            computed = judge.prefill([graded])[0]
            outcomes += [check(rules, computed) for check in EXPENSIVE]
            if findings := [outcome.finding for outcome in outcomes if outcome.finding]:
                raise SystemExit(f"honest work was rejected: {findings}")

        measured = compare(judge, [case], examine, rounds, also={"generation": lambda: again(producer, judge)})
        return measured | worker_shares(producer)


# --- timed code -----------------------------------------------------------------------------------------------------


class Timed(Producer):
    """A producer that records the time of generating and proving."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.generating_s: list[float] = []
        self.proving_s: list[float] = []

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        started_s = time.perf_counter()
        completions = super().complete(prompts, plans)
        self.generating_s.append(time.perf_counter() - started_s)
        return completions

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        started_s = time.perf_counter()
        proofs = super().prove(completions)
        self.proving_s.append(time.perf_counter() - started_s)
        return proofs


def ready(
    settings: Config, dtype: DtypeName, engine: TorchEngine, ends: tuple[int, ...] | None = None
) -> tuple[Judge, Timed]:
    """Return a validator and a worker with the model loaded. `ends` replaces the model's end tokens for the worker."""
    folder = resolve(settings.model.name)
    judge = Judge(settings, RUN, dtype)
    judge.load(folder)
    producer = Timed(settings, RUN, Identity.generate(), engine)
    producer.load(folder, 0)
    if ends is not None:
        producer.sampling = Sampling(settings.sampling.temperature, settings.sampling.max_tokens, ends)
    return judge, producer


def made(judge: Judge, producer: Producer, number: int) -> Case:
    assignment = offline_assignment(producer.config, producer.identity.public, number)
    case = judge.open(assignment, producer.identity.public, producer.submission(assignment))
    if not isinstance(case, Case):
        raise SystemExit(f"honest work cannot be read: {case.detail}")
    return case


def again(producer: Producer, judge: Judge) -> None:
    producer.submission(offline_assignment(producer.config, producer.identity.public, 0))


@torch.inference_mode()
def plain(model: Any, sequences: Sequence[Sequence[int]], rows: int) -> None:
    """Compute every logit the obvious way, in padded batches. Sorting by length keeps padding small."""
    ordered = sorted(sequences, key=len, reverse=True)
    for start in range(0, len(ordered), rows):
        part = ordered[start : start + rows]
        ids_BT = torch.zeros(len(part), len(part[0]), dtype=torch.long)
        seen_BT = torch.zeros_like(ids_BT)
        for row, sequence in enumerate(part):
            ids_BT[row, : len(sequence)] = torch.tensor(sequence)
            seen_BT[row, : len(sequence)] = 1
        model(input_ids=ids_BT, attention_mask=None if bool(seen_BT.all()) else seen_BT, use_cache=False)


@torch.inference_mode()
def packed(judge: Judge, cases: Sequence[Case]) -> None:
    for hidden_CH in hidden_states(judge.model, cases, judge.row_tokens).split(VOCABULARY_ROWS):
        judge.model.lm_head(hidden_CH)


def compare(
    judge: Judge,
    cases: Sequence[Case],
    examine: Callable[[], None],
    rounds: int,
    also: dict[str, Callable[[], None]] | None = None,
) -> dict[str, Any]:
    """Let the computations take turns. Return the seconds of each, and figures derived from their medians."""
    sequences = [case.prompts[row.group] + row.tokens for case in cases for row in case.rows]
    tokens = sum(len(row.tokens) for case in cases for row in case.rows)
    fitting = [rows for rows in PLAIN_ROWS if rows < 2 * len(sequences)] or [1]
    tried = {rows: seconds(lambda rows=rows: plain(judge.model, sequences, rows)) for rows in fitting}  # type: ignore[misc]
    best = min(tried, key=lambda rows: tried[rows])
    ways = {
        "validator": examine,
        "plain": lambda: plain(judge.model, sequences, best),
        "packed": lambda: packed(judge, cases),
        **(also or {}),
    }
    timings: dict[str, list[float]] = {name: [] for name in ways}
    examine()
    for _ in range(rounds):
        for name, way in ways.items():
            timings[name].append(seconds(way))
    median_s = {name: statistics.median(values) for name, values in timings.items()}
    return {
        "sequences": len(sequences),
        "completion_tokens": tokens,
        "prompt_tokens_a_sequence": round(sum(map(len, sequences)) / len(sequences) - tokens / len(sequences), 1),
        "plain_rows": best,
        "plain_rows_tried_s": tried,
        "seconds": timings,
        "tokens_per_s": {name: round(tokens / value, 1) for name, value in median_s.items()},
        "validator_to": {
            name: round(value / median_s["validator"], 3) for name, value in median_s.items() if name != "validator"
        },
    }


def seconds(way: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    way()
    return time.perf_counter() - started_s


def worker_shares(producer: Timed) -> dict[str, Any]:
    generating_s, proving_s = statistics.median(producer.generating_s), statistics.median(producer.proving_s)
    return {
        "worker": {"generating_s": producer.generating_s, "proving_s": producer.proving_s},
        "proofs_to_generation": round(proving_s / generating_s, 5),
    }


def say(shape: str, measured: dict[str, Any]) -> None:
    ratios = ", ".join(f"{value:.2f} x {name}" for name, value in measured["validator_to"].items())
    sys.stdout.write(
        f"{shape}: validator {measured['tokens_per_s']['validator']:.0f} tokens/s, {ratios}; "
        f"proofs {measured['proofs_to_generation']:.2%} of generation\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
