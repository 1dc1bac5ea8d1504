"""The configuration of a run. The coordinator reads the file and serves the resolved config to every other process.

config     `Config`: all sections, checked against each other
sections   the settings of each process; limits of submissions; requirements of workers
tasks      problems, prompts, rewards, the sandbox     recipe     model, sampling, loss, optimizer, fine-tuning
sites      pretraining, and several sites              section    base classes and common types
loading    TOML files and overrides to a `Config` and back; explanations of the fields
"""

from shoal.config.config import Config
from shoal.config.loading import ConfigError, check_resumed, dumps, explain, load, parse
from shoal.config.sections import EngineName, TrackerName

__all__ = ["Config", "ConfigError", "EngineName", "TrackerName", "check_resumed", "dumps", "explain", "load", "parse"]
