"""The error of this room."""

from shoal.errors import ShoalError


class ConfigError(ShoalError):
    """A config that cannot be used. The message names the key and the next step."""
