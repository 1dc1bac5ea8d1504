"""Official and popular clients of OpenAI's API against a live `shoal serve`: what works with which, as a table.

    python benchmarks/sdk_table.py                      makes throwaway environments for the clients: minutes
    python benchmarks/sdk_table.py --environments DIR   makes them in DIR, or takes those that are there

The server is a process with the bundled SmolLM2 and a chat template with tools, which that model lacks. Whether its
words make sense does not matter: a feature works if the client takes the answer and finds in it what it must find. The
clients run in processes of their own, each in an environment of its own: they need different versions of `openai`.
Left out: features that a client has no way to ask for, marked "-".
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

RESULT = Path(__file__).parent / "results" / "sdk_table.json"
FEATURES = ["chat", "stream", "seed", "logprobs", "stop", "tool", "schema", "list", "error"]
MODEL = "model"
SAYS = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY, "strict": True}}
CITIES = ("Paris", "Rome", "Oslo")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call functions:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'A call is written as\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Checks = dict[str, Callable[[], bool]]


def with_openai(url: str) -> Checks:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def chat(**more: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=SAYS, **({"max_tokens": 16, "seed": 1} | more))

    def text(**more: Any) -> str:
        return chat(**more).choices[0].message.content

    def refused() -> bool:
        try:
            chat(top_p=0.5)
        except openai.BadRequestError as error:
            return error.param == "top_p" and "full distribution" in error.message
        return False

    def parsed() -> bool:
        from pydantic import BaseModel

        class Answer(BaseModel):
            born: bool

        found = client.chat.completions.parse(model=MODEL, messages=SAYS, max_tokens=64, response_format=Answer)
        return isinstance(found.choices[0].message.parsed, Answer)

    return {
        "chat": lambda: bool(text()),
        "stream": lambda: "".join(c.choices[0].delta.content or "" for c in chat(stream=True)) == text(),
        "seed": lambda: text() == text() != text(seed=-2),
        "logprobs": lambda: len(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].top_logprobs) == 2,
        "stop": lambda: (whole := text()) and text(stop=[whole[3:6]]) == whole[: whole.index(whole[3:6])],
        "tool": lambda: called(
            chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=64).choices[0]
        ),
        "schema": lambda: json.loads(text(response_format=FORMAT, max_tokens=64))["city"] in CITIES and parsed(),
        "list": lambda: MODEL in [one.id for one in client.models.list()],
        "error": refused,
    }


def called(choice: Any) -> bool:
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    return choice.finish_reason == "tool_calls" and call.function.name == "weather" and arguments["city"] in CITIES


def with_litellm(url: str) -> Checks:
    import litellm

    def chat(**more: Any) -> Any:
        given = {"max_tokens": 16, "seed": 1, "api_base": url, "api_key": "none"} | more
        return litellm.completion(model=f"openai/{MODEL}", messages=SAYS, **given)

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
        "tool": lambda: called(chat(tools=[TOOL], tool_choice=NAMED, max_tokens=64).choices[0]),
        "schema": lambda: json.loads(text(response_format=FORMAT, max_tokens=64))["city"] in CITIES,
        "error": refused,
    }


def with_langchain(url: str) -> Checks:
    from langchain_openai import ChatOpenAI
    from openai import BadRequestError
    from pydantic import BaseModel

    class City(BaseModel):
        """Weather of a city."""

        rainy: bool

    def model(**more: Any) -> Any:
        given = {"max_tokens": 32, "seed": 1, "max_retries": 0} | more
        return ChatOpenAI(model=MODEL, base_url=url, api_key="none", **given)

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
        "tool": lambda: isinstance(
            model().with_structured_output(City, method="function_calling").invoke("Rain in Rome?"), City
        ),
        "schema": lambda: isinstance(model().with_structured_output(City).invoke("Rain in Rome?"), City),
        "error": refused,
    }


def with_pydantic_ai(url: str) -> Checks:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        rainy: bool

    chosen = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))

    def run(of: Any = str, **settings: Any) -> Any:
        agent = Agent(chosen, output_type=of, model_settings={"max_tokens": 32, "seed": 1, **settings})
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
        "tool": lambda: isinstance(run(ToolOutput(City), parallel_tool_calls=False), City),
        "schema": lambda: isinstance(run(NativeOutput(City)), City),
        "error": refused,
    }


def with_inspect(url: str) -> Checks:
    import asyncio

    from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
    from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams
    from inspect_ai.util import json_schema
    from pydantic import BaseModel

    class City(BaseModel):
        rainy: bool

    def run(tools: Any = (), choice: Any = None, **config: Any) -> Any:
        given = GenerateConfig(**({"max_tokens": 32, "seed": 1, "max_retries": 0} | config))
        model = get_model(f"openai-api/shoal/{MODEL}", base_url=url, api_key="none", memoize=False)
        asked = model.generate("What is the capital of France?", tools=list(tools), tool_choice=choice, config=given)
        return asyncio.run(asked).choices[0]

    def text(**config: Any) -> str:
        return run(**config).message.text

    def tool() -> bool:
        info = ToolInfo(
            name="weather",
            description="Weather of a city",
            parameters=ToolParams(properties={"rainy": json_schema(bool)}, required=["rainy"]),
        )
        [call] = run([info], ToolFunction("weather")).message.tool_calls
        return call.function == "weather" and isinstance(call.arguments["rainy"], bool)

    form = ResponseSchema(name="city", json_schema=json_schema(City))
    return {
        "chat": lambda: bool(text()),
        "seed": lambda: text() == text() != text(seed=2),
        "logprobs": lambda: len(run(logprobs=True, top_logprobs=2).logprobs.content[0].top_logprobs) == 2,
        "stop": lambda: (whole := text()) and text(stop_seqs=[whole[3:6]]) == whole[: whole.index(whole[3:6])],
        "tool": tool,
        "schema": lambda: isinstance(City.model_validate_json(text(response_schema=form)), City),
    }


def with_instructor(url: str) -> Checks:
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        rainy: bool

    def run(mode: Any) -> Any:
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        return client.chat.completions.create(
            model=MODEL, messages=SAYS, response_model=City, max_tokens=64, seed=1, max_retries=1
        )

    return {
        "tool": lambda: isinstance(run(instructor.Mode.TOOLS), City),
        "schema": lambda: isinstance(run(instructor.Mode.JSON_SCHEMA), City),
    }


NODE = """
import OpenAI from 'openai';
const [url, model, given] = process.argv.slice(2);
const { says, tool, format } = JSON.parse(given);
const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 });
const chat = more => client.chat.completions.create({ model, messages: says, max_tokens: 16, seed: 1, ...more });
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
  tool: async () => {
    const asked = { tools: [tool], tool_choice: 'required', parallel_tool_calls: false, max_tokens: 64 };
    const choice = (await chat(asked)).choices[0];
    const call = choice.message.tool_calls[0];
    return choice.finish_reason === 'tool_calls' && 'city' in JSON.parse(call.function.arguments);
  },
  schema: async () => 'city' in JSON.parse(await text({ response_format: format, max_tokens: 64 })),
  list: async () => (await client.models.list()).data.some(one => one.id === model),
  error: async () => {
    try { await chat({ top_p: 0.5 }); } catch (error) { return error.status === 400 && error.param === 'top_p'; }
    return false;
  },
};
const found = {};
for (const [name, check] of Object.entries(checks)) {
  try { found[name] = (await check()) ? 'yes' : 'wrong answer'; } catch (error) { found[name] = `${error}`.slice(0, 300); }
}
console.log(JSON.stringify(found));
"""
CLIENTS: dict[str, tuple[str, Callable[[str], Checks]]] = {
    "openai": ("openai", with_openai),
    "litellm": ("litellm", with_litellm),
    "langchain-openai": ("langchain-openai", with_langchain),
    "pydantic-ai": ("pydantic-ai-slim[openai]", with_pydantic_ai),
    "inspect-ai": ("inspect-ai openai", with_inspect),
    "instructor": ("instructor", with_instructor),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--client", nargs=2, metavar=("NAME", "URL"), help=argparse.SUPPRESS)  # of this script itself
    arguments = parser.parse_args()
    if arguments.client:
        name, url = arguments.client
        print(json.dumps({feature: worked(check) for feature, check in CLIENTS[name][1](url).items()}))  # noqa: T201
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.environments or Path(temporary) / "environments").resolve()
        versions = installed(folder)
        process, url = served(Path(temporary))
        try:
            found = {name: asked_by(folder, name, url) for name in CLIENTS}
            found["openai (npm)"] = asked_by_node(folder, url)
        finally:
            process.terminate()
            process.wait()
    from machine import describe

    command = "python " + " ".join([f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    result = {"command": command, "machine": describe(), "versions": versions, "found": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    table(found)


def worked(check: Callable[[], bool]) -> str:
    try:
        return "yes" if check() else "wrong answer"
    except Exception as error:  # noqa: BLE001 - whatever a client raises is the finding
        return f"{type(error).__name__}: {error}"[:300]


def installed(folder: Path) -> dict[str, str]:
    """The clients' versions in these environments, which are made first if they are not there."""
    found = {}
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
        found[name] = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    if not (folder / "node_modules" / "openai").exists():
        subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), "openai"], check=True)
    own = json.loads((folder / "node_modules" / "openai" / "package.json").read_text())
    return found | {"openai (npm)": own["version"]}


def served(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A server of the bundled model with a template that has tools, and the API's address."""
    from shoal.model.sources import SMOLLM2, resolve

    shutil.copytree(resolve(SMOLLM2), folder / MODEL)
    (folder / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    config = folder / MODEL / "tokenizer_config.json"
    own = json.loads(config.read_text())
    own.pop("chat_template", None)
    config.write_text(json.dumps(own))
    command = [sys.executable, "-m", "shoal", "serve", str(folder / MODEL), "--open", "--api-only", "--port", "0"]
    process = subprocess.Popen([*command, "--dir", str(folder / "serve")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split(" at ")[1].split()[0]
    assert process.stdout.readline().startswith("ready")
    return process, f"{url}/v1"


def asked_by(folder: Path, name: str, url: str) -> dict[str, str]:
    command = [str(folder / name / "bin" / "python"), str(Path(__file__).resolve()), "--client", name, url]
    return answered(command, folder)


def asked_by_node(folder: Path, url: str) -> dict[str, str]:
    (folder / "client.mjs").write_text(NODE)
    given = json.dumps({"says": SAYS, "tool": TOOL, "format": FORMAT})
    return answered(["node", str(folder / "client.mjs"), url, MODEL, given], folder)


def answered(command: list[str], folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHONPATH"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    with contextlib.suppress(IndexError, ValueError):
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found
    return dict.fromkeys(FEATURES, f"the client ended: {done.stderr[-300:]}")


def table(found: dict[str, dict[str, str]]) -> None:
    print("| client |", " | ".join(FEATURES), "|")  # noqa: T201
    print("| --- |", " | ".join("---" for _ in FEATURES), "|")  # noqa: T201
    for name, own in found.items():
        print(f"| {name} |", " | ".join(own.get(feature, "-") for feature in FEATURES), "|")  # noqa: T201


if __name__ == "__main__":
    main()
