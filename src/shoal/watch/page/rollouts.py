"""What the model wrote in one submission, token by token, from the stored files.

Invariant: an accepted group is shown from the file that a validator signed, a rejected one from the worker's own, decoded
in a child process because such a file may be made to crash its reader. Text is only ever text. Files in a bucket are read
with the credentials of this process's environment.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.model.turns import model_positions
from shoal.protocol.messages import MOST_MISSED
from shoal.store.folder import Folder, Store
from shoal.watch.figures import clean
from shoal.watch.page.work import submissions, why
from shoal.watch.record import Line
from shoal.watch.run import FolderRun

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.store.rollouts import AcceptedRollout, Rollout

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


class Rollouts:
    """Reads the stored files of one run."""

    def __init__(self, run: FolderRun) -> None:
        assert run.config is not None
        self.run, self.config = run, run.config
        self.limits = {
            "max_rows": self.config.workers.largest * self.config.sampling.group_size,
            "max_tokens": self.config.sampling.max_tokens,
        }
        self._tokenizer: Tokenizer | None = None

    def submission(self, number: int) -> dict[str, Any]:
        """What is known of a submission, and its verdict in words. Raises NoRolloutsError."""
        line = self._find(number)
        evidence = (line.get("evidence") or {}).items()
        names = ("submission", "step", "version", "state", "groups", "assigned_s", "uploaded_s", "judged_s")
        return {name: line[name] for name in names} | {
            "worker": clean(line["worker"]),
            "validator": clean(line["validator"]) if line["validator"] else None,
            **why(line),
            "evidence": [{"name": FIGURES.get(name, name), "value": v} for name, v in evidence if math.isfinite(v)],
            "replay": line.get("replay"),
            "full": None if line["full"] is None else bool(line["full"]),
        }

    def group(self, number: int, group: int) -> dict[str, Any]:
        """All completions of one group side by side. Raises NoRolloutsError, StoreError."""
        line = self._find(number)
        if not line.get("file"):
            raise NoRolloutsError(f"submission {number} is not settled, or was never uploaded")
        every = self._accepted(line["file"]) if line["state"] == "accepted" else self._claimed(line["file"])
        missed = line.get("missed")  # None: its validator recomputed no token, or did not say
        margins = {(rollout, position): nats for rollout, position, nats in missed or []}
        rows = {index: found for index, found in enumerate(every) if found.group == group}
        if not rows:
            raise NoRolloutsError(f"submission {number} has no group {group}")
        first = next(iter(rows.values()))
        prompt = getattr(first, "prompt", None)
        mean = sum(found.reward for found in rows.values()) / len(rows)
        room = MOST_TOKENS // len(rows)
        told = dict(enumerate(line.get("group_list", []))).get(group, {})
        return {
            "task": clean(first.task),
            "target": told.get("target", 0),
            "claimed": prompt is None,
            "prompt": None if prompt is None else self._text(prompt),
            "mean": mean if math.isfinite(mean) else None,
            "margins": missed is not None,
            "margin_limit": self.config.validator.sampling_margin,
            "farthest": MOST_MISSED if len(margins) == MOST_MISSED else None,
            "completions": [
                {
                    "reward": found.reward if math.isfinite(found.reward) else None,
                    "advantage": found.reward - mean if math.isfinite(found.reward - mean) else None,
                    "length": len(found.tokens),
                    "cut": len(found.tokens) > room,
                    "tokens": self._tokens(found, room, index, margins),
                }
                for index, found in rows.items()
            ],
        }

    def _find(self, number: int) -> Line:
        both = [*submissions(self.run.work()), *self.run.under_way()]
        for line in both:
            if line["submission"] == number:
                return line
        raise NoRolloutsError(f"there is no submission {number}")

    @cached_property
    def store(self) -> Store:
        """Raises StoreError without credentials."""
        section = self.config.store
        if not section.url:
            coordinator = self.run.path / "coordinator"
            return Folder((coordinator if coordinator.is_dir() else self.run.path) / "store")
        from shoal.store.bucket import Bucket, Place  # needs the extra `s3`

        return Bucket(Place.of(section.url, section.endpoint, section.region))

    def _accepted(self, content_hash: str) -> Sequence["AcceptedRollout | Rollout"]:
        from shoal.store.rollouts import read_accepted

        return read_accepted(self.store.get("accepted", content_hash), **self.limits).rows

    def _claimed(self, content_hash: str) -> Sequence["AcceptedRollout | Rollout"]:
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
                path = self.run.path / place / "tokenizer.json"
                if path.is_file():
                    self._tokenizer = Tokenizer.from_file(str(path))
                    break
        return self._tokenizer
