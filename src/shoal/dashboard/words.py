"""Reasons of rejections, in words for people who have not read the code. `docs/trust.md` has the checks themselves.

Invariant: every `Reason` has words. Called by the rest of this room.
"""

import re

from shoal.protocol.messages import HARD, Reason
from shoal.watch.figures import clean

REASONS: dict[Reason, str] = {
    Reason.UNREADABLE: "The file could not be read as rollouts: damaged, cut off, or larger than allowed.",
    Reason.SIGNATURE: "The file is not signed by the worker that has the task, or its rows were changed after signing.",
    Reason.CONTEXT: "The file was made for another task than the one it was uploaded for.",
    Reason.REPLAYED: "The worker handed in rollouts that had been accepted before.",
    Reason.TASKS: "The worker answered other tasks than the ones it was given, or used other seeds.",
    Reason.BOUNDS: "Token ids, lengths or numbers are outside their range, or proofs are missing.",
    Reason.ENVIRONMENT: "The file holds an answer of a tool that the tool does not give, or lacks one.",
    Reason.UNREPEATABLE: "A tool answered otherwise when it was asked again; an honest worker can see that too.",
    Reason.REWARD: "The worker claimed another reward than its completions earn.",
    Reason.PROOF: "The proofs do not fit the stated weights: another model, an older version, or quantised weights.",
    Reason.LOGPROBS: "The stated probabilities are not those of the stated weights.",
    Reason.SAMPLING: "The tokens are not what the seeds yield: chosen otherwise, or by another model.",
    Reason.TERMINATION: "Completions stop earlier than the model would have stopped.",
    Reason.DISTRIBUTION: "The tokens are too likely, or too unlikely, to be samples at the stated temperature.",
    Reason.SPECIAL_TOKENS: "The text holds tokens that only templates use and that the seeds do not yield.",
    Reason.INEXACT: "Within the limits, but not bit for bit what this machine's class computes; may be a broken machine.",
    Reason.SPENDING: "All its work together used the tolerance of the checks as honest machines do not.",
}


def reason_words(reason: str) -> str:
    """What a rejection means; an unknown reason of another version stays as it is."""
    try:
        return REASONS[Reason(reason)]
    except ValueError:
        return reason


def is_hard(reason: str) -> bool:
    """Whether the worker's own signature proves the lie."""
    return reason in set(HARD)


LONG_HEX = re.compile(r"\b[0-9a-f]{16,}\b")
ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", re.IGNORECASE)


def said(text: str) -> str:
    """Text of another machine for the page: one line, and without keys, digests and addresses.

    >>> said("cannot reach http://10.0.0.7:81 as 0123456789abcdef")
    'cannot reach [address] as [key]'
    """
    return LONG_HEX.sub("[key]", ADDRESS.sub("[address]", clean(text)))
