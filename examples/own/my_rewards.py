"""Rewards of your own: how good is a completion, from 0 to 1?"""


def exact(task, completion):
    return completion.strip() == task.answer


def close(task, completion):
    """Part of the score for being near."""
    found = completion.strip()
    return max(0.0, 1 - abs(int(found) - int(task.answer)) / 10) if found.isdecimal() else 0.0
