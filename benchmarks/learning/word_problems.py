"""Score models on GSM8K or SVAMP, before and after training: four prompts, strict and lenient grading, greedy and sampled.

    python -m benchmarks.learning.word_problems gsm8k before=MODEL after=runs/models/recipe-0 --data FOLDER --n 256
    python -m benchmarks.learning.word_problems svamp before=MODEL after=runs/models/recipe-0 --data FOLDER --n 1000

MODEL is a folder or a Hugging Face id. FOLDER has gsm8k_test.jsonl (Cobbe et al. 2021, arXiv 2110.14168) and
svamp_test.jsonl (Patel et al. 2021, arXiv 2103.07191). Each model answers the first N problems. Strict grading takes the
number after the last "####", or in the last box, as the answer. Lenient grading takes the last number, as the training
reward does. The prompt `config` is that of configs/recipe.toml or configs/words.toml, also in its number of tokens. The
others allow 256 tokens: `steps` of configs/gsm8k.toml, verl's, and Qwen's own. If training gains more than the untrained
model gains from its best prompt, it taught more than a format. Sampling, at temperature 1, uses only the first prompt.
Intervals are Wilson's, 95 %. Writes benchmarks/results/BENCHMARK-eval.json after each measurement. A measurement is skipped
if the file already has one with the same model name, prompt, temperature and N.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.machine import RESULTS, ROOT, about, commit, save
from shoal.config import Config, load
from shoal.engine.torch_engine import TorchEngine
from shoal.evals.examiner import Examiner
from shoal.model.dtype import pick
from shoal.model.sampling import rollout_seed
from shoal.model.sources import resolve
from shoal.tasks import Task
from shoal.tasks.prompt import completion_text
from shoal.tasks.rewards.answers import BOXED, last_number
from shoal.tasks.sources.schemas import recognize
from shoal.watch.estimates import wilson

CONFIGS = {"gsm8k": "recipe", "svamp": "words"}
PROMPTS = {
    "config": "",
    "steps": "{question}\nThink step by step, then write the answer, a number, after ####.",
    "verl": '{question} Let\'s think step by step and output the final answer after "####".',
    "qwen": "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
}
MARKED = re.compile(r"####(.*)")
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=list(CONFIGS))
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--data", type=Path, required=True, help="folder with the benchmark's file")
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--prompts", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    path = RESULTS / f"{arguments.benchmark}-eval.json"
    result: dict[str, Any] = about() | {"measurements": []}
    if path.exists():
        result["measurements"] = json.loads(path.read_text())["measurements"]
    done = {tuple(row[key] for key in ("model", "prompt", "temperature", "n")) for row in result["measurements"]}
    lines = (arguments.data / f"{arguments.benchmark}_test.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: arguments.n]]
    schema = recognize(rows[0])
    problems = [
        Task(f"{arguments.benchmark}/{number}", fields.question, fields.answer, "problems")
        for number, fields in enumerate(map(schema.read, rows))
    ]
    for model in arguments.models:
        name, _, folder = model.partition("=")
        for prompt in arguments.prompts:
            for temperature in (0.0, 1.0) if prompt == "config" else (0.0,):
                if (name, prompt, temperature, arguments.n) in done:
                    continue
                config = config_of(arguments.benchmark, resolve(folder), PROMPTS[prompt])
                measured = measure(config, problems, temperature, arguments.device)
                row = {"model": name, "prompt": prompt, "temperature": temperature, "n": arguments.n}
                result["measurements"].append(row | measured | {"commit": commit()})
                save(path, result)
                sys.stdout.write(f"{result['measurements'][-1]}\n")
                sys.stdout.flush()


def config_of(benchmark: str, folder: Path, prompt: str) -> Config:
    settings = [f"model.name={folder}", 'tasks.sources=[{generator="arithmetic", name="problems", reward="number"}]']
    if prompt:
        settings += [f"tasks.prompt={json.dumps(prompt)}", "sampling.max_tokens=256"]
    return load(ROOT / "configs" / f"{CONFIGS[benchmark]}.toml", settings)


def measure(config: Config, problems: list[Task], temperature: float, device: str) -> dict[str, Any]:
    """Return accuracies with intervals, and the mean length in tokens."""
    examiner, engine = Examiner(config, {}), TorchEngine(pick("auto", device)[0], device)
    examiner.load(engine, Path(config.model.name))
    strict = lenient = tokens = 0
    for at in range(0, len(problems), BATCH):
        batch = problems[at : at + BATCH]
        seeds = [[rollout_seed("word problems", number, "", 0, 0)] for number in range(at, at + len(batch))]
        completions, _ = examiner.ask(batch, at, seeds, temperature)
        for problem, (completion,) in zip(batch, completions, strict=True):
            text = completion_text(examiner.tokenizer, completion.tokens)
            strict += marked_number(text) == last_number(problem.answer)
            lenient += last_number(text) == last_number(problem.answer)
            tokens += len(completion.tokens)
    n = len(problems)
    examiner.close()
    return {
        "strict": strict / n,
        "strict_interval": interval(strict, n),
        "lenient": lenient / n,
        "lenient_interval": interval(lenient, n),
        "tokens_mean": tokens / n,
    }


def interval(right: int, n: int) -> list[float]:
    estimate = wilson(right, n)
    return [estimate.low, estimate.high]


def marked_number(text: str) -> str | None:
    """Return the first number after the last "####", or else the number in the last box, as canonical text."""
    marked = MARKED.findall(text)
    boxes = BOXED.findall(text)
    part = marked[-1] if marked else boxes[-1] if boxes else ""
    return last_number(part.strip().split(" ")[0]) if part.strip() else None


if __name__ == "__main__":
    main()
