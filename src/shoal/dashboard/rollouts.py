"""The rollout browser: groups and rejected submissions, and what the model wrote in them, token by token.

Invariant: an accepted group is shown from the file that a validator signed, a rejected one from the worker's own, decoded
in a child process because such a file may be made to crash its reader. Text is only ever text. Called by the server, one at
a time. Files in a bucket are read with the credentials of this process's environment.
"""

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config import Config
from shoal.dashboard.queries import Queries, Wanted
from shoal.dashboard.words import is_hard, reason_words, said
from shoal.errors import ShoalError
from shoal.model.turns import model_positions
from shoal.protocol.messages.checking import MOST_MISSED
from shoal.store.folder import Folder, Store
from shoal.watch.figures import clean

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.store.rollouts import AcceptedRollout, Rollout

SNIPPET = 160  # characters of a sample in the list
MOST_TOKENS = 20_000  # shown of one group
FIGURES = {  # of a verdict's evidence, in words
    "proofs_failed": "proofs that fail",
    "proof_exponent_mean": "exponents that differ in a proof, on average",
    "proof_exponent_max": "exponents that differ in the worst proof",
    "proof_mantissa_mean": "difference of mantissas, on average",
    "mismatch_frac": "share of tokens that the seeds do not yield",
    "margin_mean": "how far tokens miss the seeds' choice, on average",
    "margin_max": "how far the worst token misses it",
    "logprob_error_mean": "error of the stated log-probabilities, on average",
    "distribution_evidence": "evidence against sampling as stated, in nats",
}


class NoRolloutsError(ShoalError):
    """What was asked for cannot be shown; the message says why."""


def group_list(queries: Queries, wanted: Wanted, limit: int) -> dict[str, Any]:
    rows = queries.groups(wanted, limit + 1)
    samples = queries.samples([f"{row[1]}/{row[2]}" for row in rows if row[2] is not None])
    shown = [_row(row, samples) for row in rows[:limit]]
    more = len(rows) > limit
    last = rows[limit - 1] if more else None
    return {"rows": shown, "before": f"{last[0]}.{-1 if last[2] is None else last[2]}" if last else None}


def _row(row: Sequence[Any], samples: dict[str, str]) -> dict[str, Any]:
    (
        seq,
        id_,
        group,
        worker,
        step,
        version,
        state,
        reason,
        groups,
        reward,
        useful,
        stale,
        batch,
        tokens,
        task,
        source,
        *rest,
    ) = row
    target, judged_s = rest
    sample = json.loads(samples[f"{id_}/{group}"]) if f"{id_}/{group}" in samples else None
    fate = "rejected" if state == "rejected" else _fate(bool(useful), bool(stale), batch)
    return {
        "submission": seq,
        "group": group,
        "worker": clean(worker),
        "step": step,
        "version": version,
        "state": state,
        "reason": reason,
        "fate": fate,
        "groups": groups,
        "reward": reward,
        "tokens": tokens,
        "task": task,
        "source": source,
        "target": target,
        "judged_s": judged_s,
        "prompt": sample["prompt"][-SNIPPET:] if sample else None,
        "completion": sample["completion"][:SNIPPET] if sample else None,
    }


def _margins(verdict: str | None) -> dict[tuple[int, int], float] | None:
    """By rollout and position, what the validator recorded; None where it recomputed no token, or did not say."""
    missed = json.loads(verdict).get("missed") if verdict else None
    return None if missed is None else {(rollout, position): nats for rollout, position, nats in missed}


def _fate(useful: bool, stale: bool, batch: int | None) -> str:
    if stale:
        return "too old"
    if not useful:
        return "no signal"
    return "waiting" if batch is None else f"trained in step {batch + 1}"


class Rollouts:
    """Reads the stored files of one run."""

    def __init__(self, folder: Path, coordinator: Path, config: Config, queries: Queries) -> None:
        self.folder, self.config, self.queries = folder, config, queries
        self.coordinator = coordinator
        self.limits = {
            "max_rows": config.workers.largest * config.sampling.group_size,
            "max_tokens": config.sampling.max_tokens,
        }
        self._tokenizer: Tokenizer | None = None

    def submission(self, seq: int) -> dict[str, Any]:
        """What is known of a submission, and its verdict in words. Raises NoRolloutsError."""
        row = self.queries.submission(seq)
        if row is None:
            raise NoRolloutsError(f"there is no submission {seq}")
        (
            _,
            worker,
            validator,
            step,
            version,
            state,
            reason,
            verdict,
            *_,
            groups,
            full,
            assigned_s,
            uploaded_s,
            judged_s,
        ) = row
        told = json.loads(verdict) if verdict else {}
        return {
            "submission": seq,
            "worker": clean(worker),
            "validator": clean(validator) if validator else None,
            "step": step,
            "version": version,
            "state": state,
            "reason": reason,
            "hard": is_hard(reason) if reason else False,
            "words": reason_words(reason) if reason else "",
            "detail": said(told.get("detail", "")),
            "evidence": [
                {"name": FIGURES.get(name, name), "value": value}
                for name, value in told.get("evidence", {}).items()
                if math.isfinite(value)
            ],
            "replay": told.get("replay"),
            "full": None if full is None else bool(full),
            "groups": groups,
            "assigned_s": assigned_s,
            "uploaded_s": uploaded_s,
            "judged_s": judged_s,
            "group_list": [
                {"group": found[0], "reward": found[1], "fate": _fate(bool(found[2]), bool(found[3]), found[4])}
                for found in self.queries.group_rows(row[0])
            ],
        }

    def group(self, seq: int, group: int) -> dict[str, Any]:
        """All completions of one group side by side. Raises NoRolloutsError, StoreError."""
        row = self.queries.submission(seq)
        if row is None:
            raise NoRolloutsError(f"there is no submission {seq}")
        file_hash, accepted_hash = row[8], row[9]
        every: list[AcceptedRollout | Rollout] = []
        if row[5] == "accepted" and accepted_hash:
            every += self._accepted(accepted_hash)
        elif file_hash:
            every += self._claimed(file_hash)
        else:
            raise NoRolloutsError(f"submission {seq} was never uploaded")
        margins = _margins(row[7])
        rows = {number: found for number, found in enumerate(every) if found.group == group}
        if not rows:
            raise NoRolloutsError(f"submission {seq} has no group {group}")
        first = next(iter(rows.values()))
        prompt = getattr(first, "prompt", None)
        rewards = [found.reward for found in rows.values()]
        mean = sum(rewards) / len(rows)
        room = MOST_TOKENS // len(rows)
        return {
            "task": clean(first.task),
            "target": next((found[8] for found in self.queries.group_rows(row[0]) if found[0] == group), 0),
            "claimed": prompt is None,
            "prompt": None if prompt is None else self._text(prompt),
            "mean": mean if math.isfinite(mean) else None,
            "margins": margins is not None,
            "margin_limit": self.config.validator.sampling_margin,
            "farthest": MOST_MISSED if margins is not None and len(margins) == MOST_MISSED else None,
            "completions": [
                {
                    "reward": found.reward if math.isfinite(found.reward) else None,
                    "advantage": found.reward - mean if math.isfinite(found.reward - mean) else None,
                    "length": len(found.tokens),
                    "cut": len(found.tokens) > room,
                    "tokens": self._tokens(found, room, number, margins or {}),
                }
                for number, found in rows.items()
            ],
        }

    @cached_property
    def store(self) -> Store:
        """Raises StoreError without credentials."""
        section = self.config.store
        if not section.url:
            return Folder(self.coordinator / "store")
        from shoal.store.bucket import Bucket, Place  # needs the extra `s3`

        return Bucket(Place.of(section.url, section.endpoint, section.region))

    def _accepted(self, content_hash: str) -> Sequence["AcceptedRollout"]:
        from shoal.store.rollouts import read_accepted

        return read_accepted(self.store.get("accepted", content_hash), **self.limits).rows

    def _claimed(self, content_hash: str) -> Sequence["Rollout"]:
        from shoal.store.quarantine import Quarantine
        from shoal.store.rollouts import RolloutFileError

        try:
            with Quarantine(**self.limits) as quarantine:
                return quarantine.read(self.store.get("submissions", content_hash)).rows
        except RolloutFileError as error:
            raise NoRolloutsError(f"its file cannot be shown: {error}") from error

    def _tokens(
        self, found: "AcceptedRollout | Rollout", room: int, number: int, margins: dict[tuple[int, int], float]
    ) -> list[list[Any]]:
        """[text, probability, nats by which it misses its seed's token] of each; no probability: an environment wrote it."""
        chances: list[float | None] = [None] * len(found.tokens)
        for position, logprob in zip(model_positions(found.turns, len(found.tokens)), found.logprobs, strict=False):
            chances[position] = round(math.exp(min(logprob, 0.0)), 4) if math.isfinite(logprob) else None
        pieces = self._pieces(found.tokens[:room])
        return [
            [piece, chance, margins.get((number, position), 0.0)]
            for position, (piece, chance) in enumerate(zip(pieces, chances, strict=False))
        ]

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token. Where one character takes several, the last of them has it."""
        tokenizer = self._load()
        if tokenizer is None:
            return [f"{token} " for token in tokens]
        pieces: list[str] = []
        held: list[int] = []
        for token in tokens:
            held.append(token)
            text = tokenizer.decode(held, skip_special_tokens=False)
            if text.endswith("\ufffd") and len(held) < 4:
                pieces.append("")
                continue
            pieces.append(text)
            held = []
        return pieces

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer = self._load()
        if tokenizer is None:
            return " ".join(map(str, tokens))
        found: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
        return found

    def _load(self) -> "Tokenizer | None":
        """The run's tokenizer; None where only a coordinator's folder is at hand."""
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            for place in ("model", "learner/model"):
                path = self.folder / place / "tokenizer.json"
                if path.is_file():
                    self._tokenizer = Tokenizer.from_file(str(path))
                    break
        return self._tokenizer
