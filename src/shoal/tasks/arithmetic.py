"""Generated small sums: a verifiable task for a small model and a short run.

Invariant: sums are ordered by a hash of their text, and the first ones are held out, whatever the seed. So a held-out sum
is never trained on in any run, nor in the supervised warm-up of `bundled:tiny`.
Called through `tasks.load` by worker, validator and evaluator. The grade is 1 if the last integer of the answer is the
result, as is usual for word problems (GSM8K), else 0.
"""

import hashlib
import re
from dataclasses import dataclass

from shoal.config.recipe import TaskSection

INTEGER = re.compile(r"-?\d+")
LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
MIN_TRAIN = 16


@dataclass(frozen=True)
class Task:
    id: str
    question: str
    answer: str


class Arithmetic:
    def __init__(self, config: TaskSection) -> None:
        operands = range(config.operand_min, config.operand_max + 1)
        tasks = [_task(a, op, b) for op in dict.fromkeys(config.operations) for a in operands for b in operands]
        if len(tasks) < config.heldout + MIN_TRAIN:
            raise ValueError(
                f"{len(tasks)} sums with operands {config.operand_min}..{config.operand_max} leave fewer than "
                f"{MIN_TRAIN} to train on after {config.heldout} are held out; raise tasks.operand_max"
            )
        tasks.sort(key=lambda task: hashlib.sha256(f"shoal/arithmetic/{task.id}".encode()).digest())
        self.heldout = tasks[: config.heldout]
        self.train = tasks[config.heldout :]

    def grade(self, task: Task, answer: str) -> float:
        found = INTEGER.findall(answer)
        return float(bool(found) and LEADING_ZEROS.sub("", found[-1]) == task.answer)


def _task(a: int, operation: str, b: int) -> Task:
    result = a + b if operation == "+" else a - b
    return Task(id=f"{a}{operation}{b}", question=f"{a} {operation} {b}", answer=str(result))
