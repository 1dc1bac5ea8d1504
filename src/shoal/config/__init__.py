"""The configuration of a run. The coordinator alone reads the file; all other processes get the resolved config from it.

    recipe     tasks, sampling, loss, optimizer      sections   each process's own settings, and `Config`
    loading    TOML files and overrides into a `Config`

Every room may import this one; it imports only `shoal.errors`.
"""

from shoal.config.loading import ConfigError, dumps, load, parse
from shoal.config.sections import Cheat, Config, TrackerName

__all__ = ["Cheat", "Config", "ConfigError", "TrackerName", "dumps", "load", "parse"]
