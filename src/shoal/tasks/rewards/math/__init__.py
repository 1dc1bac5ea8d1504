"""The reward `math`: symbolic equality of final answers, through math-verify in killable processes.

reward    the reward                  final_answer    which part of a completion is its answer
equality  the rules of equality, in the killable process
"""

from shoal.tasks.rewards.math.reward import Math

__all__ = ["Math"]
