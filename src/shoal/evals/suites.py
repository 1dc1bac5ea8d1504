r"""The suites that `shoal eval` knows: public benchmarks, which lm-evaluation-harness asks and grades, and code suites.

lm_eval runs the programs of code suites without walls, so of these it only makes the completions, from tasks that are
written here, and our sandbox grades them. A code suite is data: a source of tasks and a prompt with {question}. Rows become
tasks as everywhere (`tasks/sources/schemas.py`), so what is measured here can be trained on with the same words in a config.
To add a suite, add an entry; any other name is taken for a task of lm_eval.

Sampling: temperature 0.6 and 32,768 tokens are DeepSeek-R1's (arXiv 2501.12948, section 3), whose top-p of 0.95 is left out:
engines here sample from the full distribution. Suites that are usually reported greedily have k = 1 and temperature 0.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.tasks import SourceSection
from shoal.errors import ShoalError, UserError
from shoal.files import write_file
from shoal.tasks.compiling import content_id
from shoal.tasks.sources.reading import Reading
from shoal.tasks.task import Task

# openai/simple-evals, `humaneval_eval.py`.
FUNCTION = (
    "Read the following function signature and docstring, and fully implement the function described. Your response should "
    "only contain the code for this function.\n{question}"
)
# Austin et al. 2021 (arXiv 2108.07732), section 3, without its few-shot examples; the question holds the tests.
TESTED_FUNCTION = "You are an expert Python programmer, and here is your task: {question}\nAnswer with the code alone."
# LiveCodeBench, `lcb_runner/prompts/code_generation.py`; the question holds the starter code where there is one.
PROGRAM = (
    "You will be given a question (problem specification) and will generate a correct Python program that matches the "
    "specification and passes all tests.\n\nQuestion: {question}\n\nWithout starter code, read the inputs from stdin, solve "
    "the problem and write the answer to stdout (do not directly test on the sample inputs). Enclose your code within "
    "delimiters as follows.\n```python\n# YOUR CODE HERE\n```"
)


class EvalError(ShoalError):
    """An evaluation that cannot start or continue; the message names the next step."""


class EvalUsageError(EvalError, UserError):
    """What was asked for cannot be evaluated: a suite, a model, or a folder of another evaluation."""


@dataclass(frozen=True)
class Suite:
    """`task`, `metric` and `filter` (how answers are extracted) are lm_eval's. Without `task`: a code suite."""

    name: str
    about: str  # size and paper
    k: int = 1
    temperature: float = 0.0
    max_tokens: int = 2_048
    task: str = ""
    metric: str = "exact_match"
    filter: str = ""  # "": the only one
    hub: str = ""  # of a code suite: org/name or org/name/config
    splits: tuple[str, ...] = ("test",)
    prompt: str = ""


LONG = 32_768
TABLE = [
    Suite("AIME24", "30 problems, MAA 2024", 16, 0.6, LONG, task="aime24"),
    Suite("AIME25", "30 problems, MAA 2025", 16, 0.6, LONG, task="aime25"),
    Suite("MATH-500", "500 problems, Lightman et al. 2023 (arXiv 2305.20050)", 4, 0.6, LONG, task="hendrycks_math500"),
    Suite(
        "GSM8K",
        "1,319 problems, Cobbe et al. 2021 (arXiv 2110.14168)",
        task="gsm8k_cot_zeroshot",
        filter="flexible-extract",
    ),
    Suite(
        "GPQA-diamond",
        "198 questions, Rein et al. 2023 (arXiv 2311.12022); access must be asked for on the hub",
        4,
        0.6,
        LONG,
        task="gpqa_diamond_cot_zeroshot",
        filter="flexible-extract",
    ),
    Suite("MMLU-Pro", "12,032 questions, Wang et al. 2024 (arXiv 2406.01574)", task="mmlu_pro"),
    Suite(
        "IFEval", "541 prompts, Zhou et al. 2023 (arXiv 2311.07911)", task="ifeval", metric="prompt_level_strict_acc"
    ),
    Suite(
        "LiveCodeBench",
        "880 problems, release v5, Jain et al. 2024 (arXiv 2403.07974)",
        4,
        0.6,
        LONG,
        hub="livecodebench/code_generation_lite",
        splits=("test", "test2", "test3", "test4", "test5"),
        prompt=PROGRAM,
    ),
    Suite(
        "HumanEval",
        "164 functions, Chen et al. 2021 (arXiv 2107.03374)",
        hub="openai/openai_humaneval",
        prompt=FUNCTION,
    ),
    Suite(
        "MBPP",
        "500 functions (257 in config sanitized), Austin et al. 2021 (arXiv 2108.07732)",
        hub="google-research-datasets/mbpp/full",
        prompt=TESTED_FUNCTION,
    ),
]
SUITES = {suite.name.lower(): suite for suite in TABLE}


def find(names: str) -> list[Suite]:
    """The suites of a list of names with commas, in any case; lm_eval's own tasks by their names. Raises EvalUsageError."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted or len({name.lower() for name in wanted}) < len(wanted):
        raise EvalUsageError(
            f"name each suite once, out of {', '.join(suite.name for suite in TABLE)}, or lm_eval's tasks"
        )
    return [SUITES.get(name.lower()) or Suite(name, "", task=name, metric="") for name in wanted]


def sources(suite: Suite, path: str = "") -> list[tuple[SourceSection, str]]:
    """Each of a code suite's sources and its split: on the hub, or a file or folder of the same rows."""
    common: dict[str, Any] = {"name": suite.name, "reward": "code", "prompt": suite.prompt}
    if path:
        whole = Path(path).expanduser().is_file()  # one file is all of the suite, whatever split it says it is
        return [(SourceSection(path=path, **common), split) for split in (("train",) if whole else suite.splits)]
    return [(SourceSection(hub=suite.hub, **common), split) for split in suite.splits]


def read(suite: Suite, path: str = "", n: int = 0) -> list[Task]:
    """A code suite's tasks in the order of a hash of their ids, so that the first `n` are a fair sample; 0: all.

    A task that is there twice counts once. Raises TasksNotFoundError, EvalUsageError.
    """
    found: dict[str, Task] = {}
    for source, split in sources(suite, path):
        for fields in Reading(source, split):
            name = f"{suite.name}/{content_id(fields)}"
            found[name] = Task(name, fields.question, fields.answer, suite.name, fields.tests, fields.metadata)
    if not found:
        raise EvalUsageError(f"suite {suite.name} has no tasks in {path or suite.hub}")
    if n > len(found):
        raise EvalUsageError(f"suite {suite.name} has {len(found)} tasks, fewer than --n {n}")
    ordered = sorted(found.values(), key=lambda task: hashlib.sha256(f"shoal/eval/{task.id}".encode()).digest())
    return ordered[:n] if n else ordered


def write_task(suite: Suite, tasks: Sequence[Task], folder: Path) -> str:
    """Write a code suite as a task of lm_eval, which makes its completions and grades nothing. Returns the task's name."""
    name = f"shoal_{suite.name.lower()}"
    rows = [{"message": suite.prompt.replace("{question}", task.question)} for task in tasks]
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str((folder / f"{name}.jsonl").resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "message",
        "doc_to_target": "",
        "generation_kwargs": {"until": []},
        "metric_list": [{"metric": "bypass"}],
    }
    write_file(folder / f"{name}.yaml", json.dumps(task, indent=1).encode())  # JSON is YAML
    return name
