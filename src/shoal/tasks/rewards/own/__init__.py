"""Rewards of your own: a function in a file that travels with the run. Environments of your own run in the same way.

reward    the reward, in the sandbox       trusted    in a plain process, where a person trusts the run's author
file      what is checked before a run     inside     what calls the function, in either process
"""

from shoal.tasks.rewards.own.reward import Own

__all__ = ["Own"]
