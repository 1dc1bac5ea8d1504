"""What can be known before a run starts: does its config fit the model, and can its tasks be read and graded?

Invariant: nothing is started, and only what answers a question is fetched (a hub model's config.json, the hub's tasks).
torch is not imported. A port in use and a package that is missing are named by the process that needs them.
"""

from pathlib import Path

from shoal import tasks
from shoal.config import Config, ConfigError
from shoal.model import sources
from shoal.model.sources import positions
from shoal.tasks.environments import try_out
from shoal.tasks.task import GradeError
from shoal.tasks.taskset import TaskSet


def check_length(config: Config, *, fetch: bool = False) -> None:
    """Raise ConfigError if completions of `sampling.max_tokens` exceed the model's positions.

    Nothing is checked if the model is not on this machine (unless `fetch`: a hub model's config.json is downloaded).
    Raises ModelNotFoundError.
    """
    most = positions(sources.read_config(config.model.name, fetch=fetch))
    if most is not None and config.sampling.max_tokens >= most:
        raise ConfigError(
            f"sampling.max_tokens = {config.sampling.max_tokens} does not fit {config.model.name}: prompt and completion "
            f"share its {most} positions; lower sampling.max_tokens"
        )


def load_tasks(config: Config, folder: Path | None = None) -> TaskSet:
    """Return the task set, kept in `folder`, once its rewards and environments were tried. Raises ConfigError."""
    try:
        loaded = tasks.load(config.tasks, folder)
        with tasks.Graders(config.tasks, files=loaded.files) as graders:
            graders.try_out(loaded.samples)
        try_out(config, loaded)
    except (ValueError, GradeError) as error:
        raise ConfigError(str(error)) from error
    return loaded


<<<<<<< HEAD
=======
def _model(config: Config) -> Iterator[str]:
    try:
        check_length(config, fetch=True)
    except (ConfigError, ModelNotFoundError) as error:
        yield str(error)


def _ports(config: Config) -> Iterator[str]:
    wanted = {
        "coordinator.listen": (config.coordinator.host, config.coordinator.port, 1),
        "origin.listen": (config.origin.host, config.origin.port, 1),
        "relays.listen": (config.relays.host, config.relays.port, config.relays.count),
    }
    taken: dict[tuple[str, int], str] = {}
    for key, (host, port, count) in wanted.items():
        if port and count > 1:
            yield f"{key} has port {port}, which cannot serve relays.count = {count} on one machine; choose port 0"
        elif port and (host, port) in taken:
            yield f"{key} = {host}:{port} is also {taken[host, port]}; choose another port, or 0 for a free one"
        elif reason := _cannot_bind(host, port):
            yield f"{key}: cannot listen on {host}:{port} ({reason}); choose another port, or 0 for a free one"
        taken[host, port] = key


def _cannot_bind(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port just left is free
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _packages(config: Config) -> Iterator[str]:
    tracker = config.run.tracker
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        yield f"run.tracker = \"{tracker}\" needs a package: pip install 'shoal[{tracker}]'"


>>>>>>> d441b334 (One field, listen, where a server has host and port)
def local_folder(name: str) -> Path | None:
    """The folder of a model that is on this machine for sure, without a look at the hub's cache; None for others."""
    if name in (sources.SMOLLM2, sources.TINY):
        return sources.smollm2_dir() if name == sources.SMOLLM2 else sources.tiny_dir()
    return sources.resolve(name) if name.startswith((".", "/", "~")) else None
