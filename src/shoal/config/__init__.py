"""The configuration of a run. Only the coordinator reads the file; every other process gets the resolved config from it.

    config     `Config`: all sections, checked against each other
    sections   the settings of each process, and what work and machines must meet
    tasks      problems, prompts, rewards, the sandbox     recipe     model, sampling, loss, optimizer, fine-tuning
    sites      pretraining, and several sites              section    what all sections share
    loading    TOML files and overrides to a `Config` and back; what each field means

Every room may import this one; it imports only `shoal.errors`.
"""

from shoal.config.config import Config
from shoal.config.loading import ConfigError, dumps, explain, load, parse
from shoal.config.sections import EngineName, TrackerName

__all__ = ["Config", "ConfigError", "EngineName", "TrackerName", "dumps", "explain", "load", "parse"]
