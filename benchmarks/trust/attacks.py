"""Measure the attack matrix: the validator's findings in honest work and in every lie of `adversary/attacks.py`.

    python -m benchmarks.trust.attacks configs/tiny.toml --versions DIR --n 200        every attack
    python -m benchmarks.trust.attacks configs/tiny.toml --versions DIR --only honest  some attacks; keeps other results
    python -m benchmarks.trust.attacks configs/tiny.toml --versions DIR --exact        as within an exactness class
    python -m benchmarks.trust.attacks configs/tiny.toml --versions DIR --engine vllm  workers that generate with vLLM

DIR holds consecutive policy versions v000000, v000001, .... It is learner/versions of a run that was started with `shoal
run CONFIG --set learner.keep_versions=100`. The validator judges with the newest version. Every attack gets the same
workers and tasks. Each submission goes through the whole pipeline. Then every check runs alone, independently of the
others' findings. TOPLOC's proof is also judged with two other sets of thresholds: the paper's, and the public 60/40/40.

`lasts` is the number of submissions that one worker makes with an attack until a limit rejects one or the coordinator's
sequential tests (`coordinator/trust.py`) dismiss the worker. `dismissed` is the number of accepted submissions after which
those tests alone dismiss the worker; rejected submissions do not count.

With --exact both sides use exact numerics, and every attacker claims the validator's fingerprint, so no tolerance is left.
Each submission is then compared with honest work for the same assignment. A submission with the same tokens, logprobs and
proofs counts as unchanged. An attack's gain is the mean reward of its accepted rollouts minus that of honest rollouts. Its
attempted gain counts all submissions.

Writes benchmarks/results/<label>.json after each attack, and the table next to it as .md. The exit status is 1 if honest
work was rejected.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.common.machine import RESULTS, command_line, describe, save
from benchmarks.trust.adversary.attacks import ATTACKS, TOOL_ATTACKS, Attack, Lab, attacks_on
from benchmarks.trust.by_vllm import KIND, REACH, ByVllm
from shoal import config, toploc
from shoal.cli.calibrate import RUN
from shoal.config import Config
from shoal.coordinator.trust import bets
from shoal.engine.torch_engine import TorchEngine
from shoal.evidence import ALPHA, Process
from shoal.model.dtype import pick
from shoal.model.numerics import Numerics
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment
from shoal.store.columns import PROOF_CHUNK_TOKENS
from shoal.store.rollouts import Rollout
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case, Finding
from shoal.validator.checks import ALL, DISTRIBUTION_EVIDENCE, EXACT
from shoal.validator.judge import Examined, Judge
from shoal.validator.service import BATCH
from shoal.validator.spending import spent

WORKERS = 8
PAPER_NAME, PUBLIC_NAME = "proof, thresholds of the paper", "proof, public thresholds"
THRESHOLDS = {PAPER_NAME: toploc.BFLOAT16, PUBLIC_NAME: toploc.Thresholds(60, 40, 40)}
LIMITS = {  # statistic -> its limit in [validator]
    "proof_exponent_mean": "proof_exponent_mean",
    "proof_mantissa_mean": "proof_mantissa_mean",
    "logprob_error_mean": "logprob_error_mean",
    "margin_mean": "sampling_margin_mean",
}
HEAD = (
    "| attack | rejected | first check to fire | proof check alone | TOPLOC at 60/40/40 alone | one worker lasts |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)

HEAD_EXACT = (
    "| attack | changed | of these rejected | first check to fire | reward tried | reward gained |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument(
        "--versions", type=Path, required=True, help="folder of consecutive policy versions v000000, v000001, …"
    )
    parser.add_argument("--n", type=int, default=200, help="submissions of each attack")
    parser.add_argument("--groups", type=int, help="groups of a submission (default: the config's)")
    parser.add_argument("--only", nargs="+", choices=[*ATTACKS, *TOOL_ATTACKS], help="some of the attacks")
    parser.add_argument("--label", help="name of the results file (default: attacks-CONFIG)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--with", dest="overlays", type=Path, nargs="+", default=[], help="TOML over the config")
    parser.add_argument("--exact", action="store_true", help="judge as within an exactness class, without tolerance")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: the faster one here)")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch", help="the attackers' engine")
    parser.add_argument("--max-tokens", type=int, help="length of completions (default: the config's)")
    arguments = parser.parse_args()
    by_vllm = arguments.engine == "vllm"
    if by_vllm and (arguments.exact or set(arguments.only or []) - set(REACH)):
        parser.error("--engine vllm works neither with --exact, nor with lies that change the forward by a hook")
    label = arguments.label or f"attacks-{'exact-' if arguments.exact else ''}{arguments.config.stem}"
    path = RESULTS / f"{label}.json"
    torch.set_num_threads(arguments.threads)
    settings = config.load(arguments.config, overlays=arguments.overlays)
    if arguments.groups:
        section = settings.workers.model_copy(update={"groups_per_submission": arguments.groups})
        settings = settings.model_copy(update={"workers": section})
    if arguments.max_tokens:
        sampling = settings.sampling.model_copy(update={"max_tokens": arguments.max_tokens})
        settings = settings.model_copy(update={"sampling": sampling})
    folders = sorted(folder for folder in arguments.versions.iterdir() if folder.name.startswith("v"))
    lab = Lab(folders, neighbour=identity(WORKERS))
    dtype, _ = pick(arguments.dtype or settings.model.dtype, settings.model.device)
    numerics: Numerics = "exact" if arguments.exact else "fast"
    result = json.loads(path.read_text()) if path.exists() else {"attacks": {}}
    limits = settings.validator.of(KIND if by_vllm else "")
    result |= {
        "model": settings.model.name,
        "engine": arguments.engine,
        "dtype": dtype,
        "machine": describe(),
        "numerics": numerics,
        "groups": settings.workers.groups_per_submission,
        "versions": len(folders),
        "limits": {name: getattr(limits, limit) for name, limit in LIMITS.items()}
        | {"distribution_evidence": DISTRIBUTION_EVIDENCE},
    }
    head = HEAD_EXACT if arguments.exact else HEAD
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"numerics": numerics})})
    with Judge(settings, RUN, dtype) as judge, ExitStack() as opened:
        judge.load(folders[-1])
        engine = TorchEngine(dtype, settings.model.device, numerics)  # every attacker reloads it
        if by_vllm:
            engine = opened.enter_context(closing(ByVllm(dtype, arguments.threads)))
        honest = None
        if arguments.exact:
            honest = Attack(settings, RUN, identity(0), TorchEngine(dtype, settings.model.device, numerics), lab)
            honest.load(folders[-1], len(folders) - 1)
        sys.stdout.write(head)
        attacks = attacks_on(settings)
        for name in arguments.only or (REACH if by_vllm else attacks):
            attacker = attacks[name](settings, RUN, identity(0), engine, lab)
            attacker.kind = KIND if by_vllm else ""
            attacker.load(folders[-1], len(folders) - 1)
            result["attacks"][name] = {"command": command_line()} | measure(
                judge, attacker, settings, arguments.n, honest
            )
            result["attacks"] = {known: result["attacks"][known] for known in attacks if known in result["attacks"]}
            save(path, result)
            sys.stdout.write((exact_row if arguments.exact else row)(name, result["attacks"][name]))
            sys.stdout.flush()
    return int(bool(result["attacks"].get("honest", {}).get("rejected")))


@dataclass
class Tally:
    """The findings in the submissions of one attack."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: Counter[str] = field(default_factory=Counter)  # check that fired first
    alone: Counter[str] = field(default_factory=Counter)  # findings of each check when it runs alone
    evidence: dict[str, list[float]] = field(default_factory=dict)
    unchanged: int = 0  # submissions whose tokens, logprobs and proofs are those of honest work
    slipped: int = 0  # submissions that changed something and were accepted
    tried: list[float] = field(default_factory=list)  # mean reward of each submission minus that of honest work
    gained: list[float] = field(default_factory=list)  # the same for accepted submissions
    process: Process = field(default_factory=Process)  # sequential tests of one worker that makes all submissions
    lasts: int | None = None  # that worker's submissions until it is rejected or dismissed
    dismissed: int | None = None  # that worker's accepted submissions until it is dismissed

    def follow(self, one: Examined | None, settings: Config) -> None:
        """Add the worker's next submission. None stands for a file that could not be opened."""
        if self.dismissed is not None:
            return
        if one is None or one.finding is not None:
            self.lasts = self.lasts or self.process.observations + 1
            return
        self.process = self.process.after(bets(spent(one.case, settings, one.evidence), settings))
        if self.process.evidence >= -math.log(ALPHA):
            self.dismissed = self.process.observations
            self.lasts = self.lasts or self.dismissed

    def add(self, judge: Judge, examined: Sequence[Examined]) -> None:
        """Add the pipeline's findings, then run every check alone on every case."""
        assert judge.rules is not None
        unseen = {n: judge.grade(one.case) for n, one in enumerate(examined) if one.case.prefill is None}
        computed = dict(zip(unseen, judge.prefill(list(unseen.values())), strict=True))
        for n, one in enumerate(examined):
            case = computed.get(n, one.case)
            case = (
                case if case.rewards else judge.grade(case)
            )  # a submission that the prefill rejected is not graded yet
            checks = [*ALL, *EXACT] if case.exact else ALL
            outcomes = {check.__name__: check(judge.rules, case) for check in checks}
            fired = [name for name, outcome in outcomes.items() if outcome.finding]
            self.alone.update(fired)
            self.alone.update(by_thresholds(case))
            if one.finding is not None:
                self.reasons[one.finding.reason] += 1
                self.first[next(name for name in fired if outcomes[name].finding == one.finding)] += 1
            for outcome in outcomes.values():
                for name, value in outcome.evidence.items():
                    self.evidence.setdefault(name, []).append(value)

    def compare(self, judge: Judge, one: Examined, honest: Case) -> None:
        """Compare with honest work: record whether the attack changed anything, and its gain."""
        same = [_made(row) for row in one.case.rows] == [_made(row) for row in honest.rows]
        same = same and one.case.header.signer == honest.header.signer
        self.unchanged += same
        self.slipped += not same and one.finding is None
        if one.case.prefill:
            gain = _mean_reward(judge, one.case) - _mean_reward(judge, honest)
            self.tried.append(gain)
            if one.finding is None:
                self.gained.append(gain)


def _made(row: Rollout) -> tuple[list[int], list[float], list[bytes]]:
    return row.tokens, row.logprobs, row.proofs


def _mean_reward(judge: Judge, case: Case) -> float:
    graded = case if case.rewards else judge.grade(case)
    return statistics.fmean(graded.rewards)


def measure(judge: Judge, attacker: Attack, settings: Config, n: int, honest: Attack | None) -> dict[str, Any]:
    """Make and judge `n` submissions, a batch at a time. With --exact, `honest` is the honest worker to compare with."""
    tally, making_s, judging_s = Tally(), 0.0, 0.0
    for start in range(0, n, BATCH):
        opened: list[Case | Finding] = []
        for number in range(start, min(start + BATCH, n)):
            assignment, data, seconds = make(attacker, settings, number)
            making_s += seconds
            opened.append(judge.open(assignment, attacker.identity.public, data))
        cases = [replace(case, exact=honest is not None) for case in opened if isinstance(case, Case)]
        for finding in (finding for finding in opened if isinstance(finding, Finding)):
            tally.reasons[finding.reason] += 1
            tally.first["open"] += 1
            tally.follow(None, settings)
        started_s = time.perf_counter()
        examined = judge.examine(cases)
        judging_s += time.perf_counter() - started_s
        tally.add(judge, examined)
        for one in examined:
            tally.follow(one, settings)
        for one in examined if honest is not None else []:
            tally.compare(judge, one, _honest_case(judge, honest, settings, one.case))
    return {
        "n": n,
        "rejected": sum(tally.reasons.values()),
        "reasons": dict(tally.reasons),
        "lasts": tally.lasts,
        "dismissed": tally.dismissed,
        "unchanged": tally.unchanged,
        "slipped": tally.slipped,
        "tried": statistics.fmean(tally.tried) if tally.tried else 0.0,
        "gained": statistics.fmean(tally.gained) if tally.gained else 0.0,
        "first": dict(tally.first),
        "alone": dict(tally.alone),
        "evidence": {
            name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
            for name, values in tally.evidence.items()
        },
        "making_s": round(making_s / n, 3),  # seconds per submission
        "judging_s": round(judging_s / n, 3),
    }


def _honest_case(judge: Judge, honest: Attack, settings: Config, case: Case) -> Case:
    """Return the opened submission of honest work for the same assignment."""
    assignment, data, _ = make(honest, settings, case.assignment.number)
    opened = judge.open(assignment, case.worker, data)
    assert isinstance(opened, Case), opened
    return opened


def make(attacker: Attack, settings: Config, number: int) -> tuple[Assignment, bytes, float]:
    """Make the file of submission `number`. Several workers take turns. Return assignment, file and seconds."""
    attacker.identity = identity(number % WORKERS)
    assignment = offline_assignment(settings, attacker.identity.public, number)
    started_s = time.perf_counter()
    data = attacker.submission(assignment)
    return assignment, data, time.perf_counter() - started_s


def by_thresholds(case: Case) -> list[str]:
    """Return the sets of TOPLOC thresholds that some proof exceeds. Shoal's limits on the mean do not count here."""
    prefill = case.computed()
    hiddens = list(torch.split(prefill.hidden_NH, prefill.lengths))
    try:
        rollouts = toploc.verify_many(hiddens, [row.proofs for row in case.rows], chunk_tokens=PROOF_CHUNK_TOKENS)
    except toploc.ProofError:
        return list(THRESHOLDS)
    chunks = [chunk for rollout in rollouts for chunk in rollout]
    return [name for name, limits in THRESHOLDS.items() if not all(map(limits.passes, chunks))]


def identity(number: int) -> Identity:
    """Return a key derived from this number."""
    seed = hashlib.sha256(f"shoal/attacks/{number}".encode()).digest()
    return Identity(Ed25519PrivateKey.from_private_bytes(seed))


def row(name: str, figures: dict[str, Any]) -> str:
    n = figures["n"]
    ordered = sorted(figures["first"].items(), key=lambda pair: -pair[1])
    first = ", ".join(check if count == n else f"{check} ({share(count, n)})" for check, count in ordered) or "none"
    proof, public = (share(figures["alone"].get(check, 0), n) for check in ("proof", PUBLIC_NAME))
    lasts = figures["lasts"] or f"all {n}" if "lasts" in figures else ""
    rejected = f"{figures['rejected']} of {n} ({share(figures['rejected'], n)})"
    return f"| {name} | {rejected} | {first} | {proof} | {public} | {lasts} |\n"


def exact_row(name: str, figures: dict[str, Any]) -> str:
    n, changed = figures["n"], figures["n"] - figures["unchanged"]
    ordered = sorted(figures["first"].items(), key=lambda pair: -pair[1])
    first = ", ".join(f"{check} ({count})" for check, count in ordered) or "none"
    caught = f"{changed - figures['slipped']} of {changed}" if changed else "nothing was changed"
    return f"| {name} | {changed} of {n} | {caught} | {first} | {figures['tried']:+.3f} | {figures['gained']:+.3f} |\n"


def share(count: int, n: int) -> str:
    """Return a percentage that shows 0 or 100 only if it is exactly 0 or 100."""
    percent = 100 * count / n
    return f"{percent:.0f} %" if percent in (0, 100) or 1 <= percent <= 99 else f"{percent:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
