"""Calls of a candidate's functions in its sandbox, and the tests that make such calls from another sandbox.

Invariant: every call carries a random number, and its answer must begin with the same number. So a program that writes
answers before it is called fails: it cannot know the numbers. Nothing that comes out of either process is evaluated here;
`relay` passes bytes on unread.
Called by `reward.py`.
"""

import secrets

from shoal.errors import ShoalError
from shoal.sandbox import Conversation, Result
from shoal.tasks.rewards.code.compare import Pairs, SetItems, shown
from shoal.tasks.rewards.wire import pack, unpack
from shoal.tasks.task import Outcome

NUMBER_BYTES = 8
END_S = 0.5  # for a candidate to end after its last call


class FailedError(ShoalError):
    """The candidate failed; the message says why."""

    def __init__(self, detail: str, outcome: Outcome = "graded") -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome
        self.passed = 0  # cases before


class BadTestsError(ShoalError):
    """The tests failed by themselves, whatever the candidate is."""


class Candidate:
    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.ended_here = True  # False: it ended before it was asked to

    def load(self, source: str, prompt: str, entry: str) -> None:
        """Run the completion's code up to its functions. Raises FailedError."""
        self.conversation.send(pack([source, prompt, entry]))
        frame = self._receive()
        kind, text = frame[:1], frame[1:300].decode(errors="replace")
        if kind == b"P":
            raise FailedError(f"it does not parse: {text}", "wrong_format")
        if frame != b"R":
            raise FailedError(f"its definitions raise {raised(frame[1:])}" if kind == b"X" else "it wrote out of turn")

    def call(self, arguments: bytes) -> bytes:
        """The answer to one call, without its number. Raises FailedError."""
        number = secrets.token_bytes(NUMBER_BYTES)
        self.conversation.send(number + arguments)
        frame = self._receive()
        if frame[:NUMBER_BYTES] != number:
            raise FailedError("it answered before it was asked")
        if len(frame) == NUMBER_BYTES:  # the tests' process ends at an empty answer, and would be blamed
            raise FailedError("it answered nothing")
        return frame[NUMBER_BYTES:]

    def end(self) -> Result:
        return self.conversation.close(END_S)

    def _receive(self) -> bytes:
        frame = self.conversation.receive()
        if frame is None:
            self.ended_here = False
            raise FailedError(self.describe(self.conversation.close(END_S)))
        return frame

    @staticmethod
    def describe(result: Result) -> str:
        last = result.stderr.rstrip().rpartition(b"\n")[2].decode(errors="replace")[:300]
        reasons = {
            "exited": f"it ended with exit code {result.exit_code}",
            "killed": "it was killed",
            "timeout": f"over its time limit ({result.cpu_s:.1f} s of CPU, {result.wall_s:.1f} s)",
            "memory": "over its memory limit",
            "output": "over its limit of output",
        }
        return reasons[result.outcome] + (f": {last}" if last else "")


def relay(checker: Conversation, candidate: Candidate, tests: str, prompt: str, entry: str) -> None:
    """Let the tests in `checker` call the candidate until they pass. Raises FailedError or BadTestsError."""
    checker.send(pack([tests, prompt, entry]))
    answered = 0
    while (frame := checker.receive()) is not None:
        kind, text = frame[:1], frame[1:].decode(errors="replace")
        if kind == b"C":
            checker.send(candidate.call(frame[1:]))
            answered += 1
        elif kind == b"T" or not answered:
            raise BadTestsError(f"the tests are at fault: {text or 'they call nothing'}")
        elif kind == b"P":
            return
        else:
            raise FailedError(f"call {answered}: {text}")
    result = checker.close(END_S)
    if answered and result.outcome != "exited":
        raise FailedError(f"the tests do not end on its answers ({result.outcome})")
    raise BadTestsError(f"the tests' process died: {Candidate.describe(result)}")


def raised(packed: bytes) -> str:
    """The exception that crossed, for people."""
    try:
        name, message = unpack(packed, lambda _, items: SetItems(items), Pairs)
    except (ValueError, TypeError):
        return "an unreadable exception"
    return f"{shown(name)[1:-1]}: {shown(message, 300)[1:-1]}"
