"""A verifiers environment in a dozen lines: small sums, a reward for the right number, and a smaller reward for brevity."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: int


class Sum(vf.Task[Data]):
    @vf.reward
    async def correct(self, task, trace) -> float:
        return float(trace.last_reply.strip() == str(task.answer))

    @vf.reward(weight=0.25)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) <= 4)


class Config(vf.TasksetConfig):
    top: int = 20


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for a in range(self.config.top):
            for b in range(self.config.top):
                yield Sum(Data(prompt=f"{a} + {b} =", answer=a + b), self.config.task)
