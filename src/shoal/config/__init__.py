"""The configuration of a run. Only the coordinator reads the file; every other process gets the resolved config from it.

    recipe     tasks, sampling, loss, optimizer      sections   each process's own settings, and `Config`
    loading    TOML files and overrides to a `Config` and back
    explain    every field with its description, type, default and source

Every room may import this one; it imports only `shoal.errors`.
"""

from shoal.config.loading import ConfigError, dumps, load, parse
from shoal.config.sections import Cheat, Config, EngineName, TrackerName

__all__ = ["Cheat", "Config", "ConfigError", "EngineName", "TrackerName", "dumps", "load", "parse"]
