"""Shared models: a tiny random llama, and the bundled SmolLM2, which is converted and loaded once per session.

Many tests share the session-scoped models, so no test may change their weights.
"""

import asyncio
import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shoal.model.load import load_model, load_tokenizer, save_model
from shoal.model.sources import SMOLLM2, resolve

from .skipped import pytest_terminal_summary
from .turns import make_talkative, register

__all__ = ["pytest_terminal_summary"]

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores, so one thread each is fastest
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


LOCKED = """
import sys
from pathlib import Path
from shoal.files import lock
print(lock(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[None]:
    """Let another process hold the lock of this file."""
    command = [sys.executable, "-c", LOCKED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "True\n"
        yield
        process.stdin.close()


TINY_CHARS = "\n 0123456789abcdefghijklmnopqrstuvwxyz+-*/=.,:;?!()<>[]'\"#%"
TINY_SPECIALS = ["<pad>", "<eos>", "<user>", "<assistant>"]
TINY_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*TINY_SPECIALS, *TINY_CHARS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=TINY_SPECIALS[2:],
        chat_template=TINY_TEMPLATE,
    )


def tiny_llama(seed: int, **changed: Any) -> LlamaForCausalLM:
    """Return a llama with random weights, wide enough that its logits depend on the prompt and are far from uniform."""
    config: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.12,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(config | changed))).eval()


@pytest.fixture(scope="session")
def ipv6() -> None:
    """Skip the test if this machine has no IPv6 loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread. Small models are slower on several threads, and far slower if the cores are busy too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_tiny() -> Any:
    """Yield `make_tiny(seed, **config)`, which returns a fresh random llama that a test may change."""
    return tiny_llama


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two published versions of one tiny llama, as Hugging Face folders with a character tokenizer."""
    parent = tmp_path_factory.mktemp("tiny")
    for seed in (0, 1):
        save_model(tiny_llama(seed), tiny_tokenizer(), parent / str(seed))
    return parent / "0", parent / "1"


@pytest.fixture(scope="session")
def tiny_folder(tiny_folders: tuple[Path, Path]) -> Path:
    return tiny_folders[0]


@pytest.fixture(scope="session")
def talkative_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the first of the two versions, changed to emit many end tokens, for conversations."""
    return make_talkative(tiny_folder, tmp_path_factory.mktemp("talkative") / "0")


@pytest.fixture(scope="module")
def echo() -> Iterator[None]:
    """Let the configs in a test module name the environment `echo` of `turns`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        register(monkeypatch)
        yield


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Any:
    return load_model(tiny_folder)


@pytest.fixture(scope="session")
def bundled() -> Path:
    """Return SmolLM2's folder. If its package is missing, fail with an error that says what to install."""
    return resolve(SMOLLM2)


@pytest.fixture(scope="session")
def bundled_model(bundled: Path) -> Any:
    return load_model(bundled)


@pytest.fixture(scope="session")
def bundled_tokenizer(bundled: Path) -> Any:
    return load_tokenizer(bundled)
