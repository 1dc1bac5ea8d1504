"""Score models on GSM8K, before and after training: three prompts, strict and lenient grading, greedy and sampled.

    python -m benchmarks.learning.gsm8k before=MODEL after=runs/gsm8k/model --data FOLDER --n 500

MODEL is a folder or a Hugging Face id. FOLDER has gsm8k_test.jsonl (Cobbe et al. 2021, arXiv 2110.14168). Each model answers
the first N of its 1,319 problems, with up to 256 tokens. Strict grading takes the number after the last "####", or in the
last box, as the answer. Lenient grading takes the last number, as the training reward does. The first prompt is that of
configs/gsm8k.toml. The others are verl's and Qwen's own. If training gains more than the untrained model gains from its best
prompt, it taught more than a format. Sampling, at temperature 1, uses only the first prompt. Intervals are Wilson's, 95 %.
Writes benchmarks/results/gsm8k-eval.json after each measurement. A measurement is skipped if the file already has one with
the same model name, prompt, temperature and N.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.machine import RESULTS, ROOT, command_line, commit, describe, save
from shoal.config import load
from shoal.engine.torch_engine import TorchEngine
from shoal.evals.examiner import Examiner
from shoal.model.dtype import pick
from shoal.model.sampling import rollout_seed
from shoal.model.sources import resolve
from shoal.tasks import Task
from shoal.tasks.prompt import completion_text
from shoal.tasks.rewards.answers import BOXED, last_number
from shoal.watch.estimates import wilson

PROMPTS = {
    "config": "",
    "verl": '{question} Let\'s think step by step and output the final answer after "####".',
    "qwen": "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
}
MARKED = re.compile(r"####(.*)")
BATCH = 256
PATH = RESULTS / "gsm8k-eval.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--prompts", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"command": command_line(), "machine": describe(), "measurements": []}
    if PATH.exists():
        result["measurements"] = json.loads(PATH.read_text())["measurements"]
    done = {tuple(row[key] for key in ("model", "prompt", "temperature", "n")) for row in result["measurements"]}
    rows = [json.loads(line) for line in (arguments.data / "gsm8k_test.jsonl").read_text().splitlines()]
    problems = [
        Task(f"gsm8k/{number}", row["question"], row["answer"].rpartition("####")[2].strip(), "gsm8k")
        for number, row in enumerate(rows[: arguments.n])
    ]
    for model in arguments.models:
        name, _, folder = model.partition("=")
        for prompt in arguments.prompts:
            for temperature in (0.0, 1.0) if prompt == "config" else (0.0,):
                if (name, prompt, temperature, arguments.n) in done:
                    continue
                measured = measure(resolve(folder), problems, PROMPTS[prompt], temperature, arguments.device)
                row = {"model": name, "prompt": prompt, "temperature": temperature, "n": arguments.n}
                result["measurements"].append(row | measured | {"commit": commit()})
                save(PATH, result)
                sys.stdout.write(f"{result['measurements'][-1]}\n")
                sys.stdout.flush()


def measure(folder: Path, problems: list[Task], prompt: str, temperature: float, device: str) -> dict[str, Any]:
    """Return accuracies with intervals, and the mean length in tokens."""
    settings = [
        f"model.name={folder}",
        "tasks.sources.0.reward=number",
        *([f"tasks.prompt={json.dumps(prompt)}"] if prompt else []),
    ]
    config = load(ROOT / "configs" / "gsm8k.toml", settings)
    examiner, engine = Examiner(config, {}), TorchEngine(pick("auto", device)[0], device)
    examiner.load(engine, folder)
    strict = lenient = tokens = 0
    for at in range(0, len(problems), BATCH):
        batch = problems[at : at + BATCH]
        seeds = [[rollout_seed("gsm8k", number, "", 0, 0)] for number in range(at, at + len(batch))]
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
