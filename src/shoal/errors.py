"""The base of every error that its message explains.

`cli` prints a `ShoalError`, or an `OSError`, as one line. Any other exception is a bug and keeps its traceback.
"""


class ShoalError(Exception):
    """The message names what failed and the next step."""
