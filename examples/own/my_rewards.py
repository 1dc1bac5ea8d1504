"""Your own rewards. Each returns a completion's score, from 0 to 1."""


def exact(task, completion):
    return completion.strip() == task.answer


def close(task, completion):
    """Return more for an answer that is nearer to the right one."""
    answer = completion.strip()
    return max(0.0, 1 - abs(int(answer) - int(task.answer)) / 10) if answer.isdecimal() else 0.0
