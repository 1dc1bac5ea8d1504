"""The reward `code`: a completion's program against its task's tests, in the sandbox.

reward     the reward, with its three kinds of tests    talk       calls of a candidate, relayed between two sandboxes
tests      the tests of a task, read from JSON          compare    equality of outputs and values, outside of the sandbox
extract    the program in a completion
candidate, checker    what runs in the sandboxes: the model's side, and the tests'
"""

from shoal.tasks.rewards.code.reward import Code

__all__ = ["Code"]
