"""Tabulate which features work when clients of OpenAI's API use a live `shoal serve`.

    python -m benchmarks.pool.sdk_table                      makes temporary environments for the clients (minutes)
    python -m benchmarks.pool.sdk_table --environments DIR   makes missing environments in DIR and reuses the others

The server is a process with the bundled SmolLM2. A feature works if the client accepts the response and the response has
the right content. Each client runs in its own process and environment, because clients need different versions of `openai`.
"-" marks a feature that a client cannot request.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "sdk_table.json"
FEATURES = ["chat", "stream", "seed", "logprobs", "stop", "list", "error"]
MODEL = "model"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
Checks = dict[str, Callable[[], bool]]


def with_openai(url: str) -> Checks:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def chat(**more: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=MESSAGES, **({"max_tokens": 16, "seed": 1} | more))

    def text(**more: Any) -> str:
        return chat(**more).choices[0].message.content

    def refused() -> bool:
        try:
            chat(top_p=0.5)
        except openai.BadRequestError as error:
            return error.param == "top_p" and "full distribution" in error.message
        return False

    return {
        "chat": lambda: bool(text()),
        "stream": lambda: "".join(c.choices[0].delta.content or "" for c in chat(stream=True)) == text(),
        "seed": lambda: text() == text() != text(seed=-2),
        "logprobs": lambda: len(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].top_logprobs) == 2,
        "stop": lambda: (whole := text()) and text(stop=[whole[3:6]]) == whole[: whole.index(whole[3:6])],
        "list": lambda: MODEL in [one.id for one in client.models.list()],
        "error": refused,
    }


def with_litellm(url: str) -> Checks:
    import litellm

    def chat(**more: Any) -> Any:
        options = {"max_tokens": 16, "seed": 1, "api_base": url, "api_key": "none"} | more
        return litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **options)

    def text(**more: Any) -> str:
        return chat(**more).choices[0].message.content

    def refused() -> bool:
        try:
            chat(top_p=0.5)
        except litellm.BadRequestError as error:
            return "full distribution" in str(error)
        return False

    return {
        "chat": lambda: bool(text()),
        "stream": lambda: "".join(c.choices[0].delta.content or "" for c in chat(stream=True)) == text(),
        "seed": lambda: text() == text() != text(seed=-2),
        "logprobs": lambda: len(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].top_logprobs) == 2,
        "stop": lambda: (whole := text()) and text(stop=[whole[3:6]]) == whole[: whole.index(whole[3:6])],
        "error": refused,
    }


def with_langchain(url: str) -> Checks:
    from langchain_openai import ChatOpenAI
    from openai import BadRequestError

    def model(**more: Any) -> Any:
        options = {"max_tokens": 32, "seed": 1, "max_retries": 0} | more
        return ChatOpenAI(model=MODEL, base_url=url, api_key="none", **options)

    def text(**more: Any) -> str:
        return model(**more).invoke("What is the capital of France?").content

    def refused() -> bool:
        try:
            text(top_p=0.5)
        except BadRequestError as error:
            return error.param == "top_p"
        return False

    return {
        "chat": lambda: bool(text()),
        "stream": lambda: "".join(c.content for c in model().stream("What is the capital of France?")) == text(),
        "seed": lambda: text() == text() != text(seed=-2),
        "logprobs": lambda: bool(model(logprobs=True).invoke("one").response_metadata["logprobs"]["content"]),
        "stop": lambda: (whole := text()) and text(stop=[whole[3:6]]) == whole[: whole.index(whole[3:6])],
        "error": refused,
    }


def with_pydantic_ai(url: str) -> Checks:
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chosen = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))

    def run(**settings: Any) -> Any:
        agent = Agent(chosen, model_settings={"max_tokens": 32, "seed": 1, **settings})
        return agent.run_sync("What is the capital of France?").output

    def streamed() -> str:
        agent = Agent(chosen, model_settings={"max_tokens": 32, "seed": 1})
        return agent.run_stream_sync("What is the capital of France?").get_output()

    def refused() -> bool:
        try:
            run(top_p=0.5)
        except ModelHTTPError as error:
            return error.status_code == 400 and "full distribution" in str(error.body)
        return False

    return {
        "chat": lambda: bool(run()),
        "stream": lambda: streamed() == run(),
        "seed": lambda: run() == run() != run(seed=-2),
        "error": refused,
    }


def with_inspect(url: str) -> Checks:
    import asyncio

    from inspect_ai.model import GenerateConfig, get_model

    def run(**config: Any) -> Any:
        options = GenerateConfig(**({"max_tokens": 32, "seed": 1, "max_retries": 0} | config))
        model = get_model(f"openai-api/shoal/{MODEL}", base_url=url, api_key="none", memoize=False)
        return asyncio.run(model.generate("What is the capital of France?", config=options)).choices[0]

    def text(**config: Any) -> str:
        return run(**config).message.text

    return {
        "chat": lambda: bool(text()),
        "seed": lambda: text() == text() != text(seed=2),
        "logprobs": lambda: len(run(logprobs=True, top_logprobs=2).logprobs.content[0].top_logprobs) == 2,
        "stop": lambda: (whole := text()) and text(stop_seqs=[whole[3:6]]) == whole[: whole.index(whole[3:6])],
    }


NODE = """
import OpenAI from 'openai';
const [url, model, encoded] = process.argv.slice(2);
const messages = JSON.parse(encoded);
const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 });
const chat = more => client.chat.completions.create({ model, messages, max_tokens: 16, seed: 1, ...more });
const text = async more => (await chat(more)).choices[0].message.content;
const streamed = async () => {
  let all = '';
  for await (const chunk of await chat({ stream: true })) all += chunk.choices[0]?.delta?.content ?? '';
  return all;
};
const checks = {
  chat: async () => (await text()).length > 0,
  stream: async () => await streamed() === await text(),
  seed: async () => await text() === await text() && await text() !== await text({ seed: -2 }),
  logprobs: async () =>
    (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content[0].top_logprobs.length === 2,
  stop: async () => {
    const whole = await text();
    const stop = whole.slice(3, 6);
    return await text({ stop: [stop] }) === whole.slice(0, whole.indexOf(stop));
  },
  list: async () => (await client.models.list()).data.some(one => one.id === model),
  error: async () => {
    try { await chat({ top_p: 0.5 }); } catch (error) { return error.status === 400 && error.param === 'top_p'; }
    return false;
  },
};
const results = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    results[name] = (await check()) ? 'yes' : 'wrong answer';
  } catch (error) { results[name] = `${error}`.slice(0, 300); }
}
console.log(JSON.stringify(results));
"""
CLIENTS: dict[str, tuple[str, Callable[[str], Checks]]] = {
    "openai": ("openai", with_openai),
    "litellm": ("litellm", with_litellm),
    "langchain-openai": ("langchain-openai", with_langchain),
    "pydantic-ai": ("pydantic-ai-slim[openai]", with_pydantic_ai),
    "inspect-ai": ("inspect-ai openai", with_inspect),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--client", nargs=2, metavar=("NAME", "URL"), help=argparse.SUPPRESS)  # for internal use
    arguments = parser.parse_args()
    if arguments.client:
        name, url = arguments.client
        print(json.dumps({feature: worked(check) for feature, check in CLIENTS[name][1](url).items()}))  # noqa: T201
        return

    from benchmarks.common.machine import about, save
    from benchmarks.common.process import serving
    from shoal.model.sources import SMOLLM2, resolve

    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.environments or Path(temporary) / "environments").resolve()
        versions = installed(folder)
        model = shutil.copytree(resolve(SMOLLM2), Path(temporary) / MODEL)
        more = ["--open", "--api-only", "--port", "0", "--dir", Path(temporary) / "serve"]
        with serving("serve", model, *more) as (_, url):
            figures = {name: run_client(folder, name, f"{url}/v1") for name in CLIENTS}
            figures["openai (npm)"] = run_node_client(folder, f"{url}/v1")

    result = about() | {"versions": versions, "found": figures}
    save(arguments.out, result)
    table(figures)


def worked(check: Callable[[], bool]) -> str:
    try:
        return "yes" if check() else "wrong answer"
    except Exception as error:  # noqa: BLE001 - any error of a client is a result
        return f"{type(error).__name__}: {error}"[:300]


def installed(folder: Path) -> dict[str, str]:
    """Make missing environments. Return the clients' versions."""
    figures = {}
    for name, (packages, _) in CLIENTS.items():
        python = folder / name / "bin" / "python"
        ask = [
            str(python),
            "-c",
            f"from importlib.metadata import version; print(version('{packages.split()[0].partition('[')[0]}'))",
        ]
        if not python.exists() or subprocess.run(ask, capture_output=True).returncode:
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
            install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*install, *packages.split()], check=True)
        figures[name] = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    if not (folder / "node_modules" / "openai").exists():
        subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), "openai"], check=True)
    own = json.loads((folder / "node_modules" / "openai" / "package.json").read_text())
    return figures | {"openai (npm)": own["version"]}


def run_client(folder: Path, name: str, url: str) -> dict[str, str]:
    command = [str(folder / name / "bin" / "python"), str(Path(__file__).resolve()), "--client", name, url]
    return read_results(command, folder)


def run_node_client(folder: Path, url: str) -> dict[str, str]:
    (folder / "client.mjs").write_text(NODE)
    return read_results(["node", str(folder / "client.mjs"), url, MODEL, json.dumps(MESSAGES)], folder)


def read_results(command: list[str], folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHONPATH"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    with contextlib.suppress(IndexError, ValueError):
        figures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return figures
    return dict.fromkeys(FEATURES, f"the client ended: {done.stderr[-300:]}")


def table(figures: dict[str, dict[str, str]]) -> None:
    print("| client |", " | ".join(FEATURES), "|")  # noqa: T201
    print("| --- |", " | ".join("---" for _ in FEATURES), "|")  # noqa: T201
    for name, own in figures.items():
        print(f"| {name} |", " | ".join(own.get(feature, "-") for feature in FEATURES), "|")  # noqa: T201


if __name__ == "__main__":
    main()
