"""The suites of `shoal eval`: public benchmarks run by lm-evaluation-harness (lm_eval), three of them for code.

lm_eval runs programs without a sandbox. So for code suites it only generates completions, from a task definition
written here. Shoal runs their programs in its own sandbox. Rows become tasks as in training
(`tasks/sources/schemas.py`).
Most suites sample up to 32,768 tokens at temperature 0.6, as for DeepSeek-R1 (arXiv 2501.12948, section 3), but without
its top-p of 0.95, because engines here sample from the full distribution. Suites whose greedy accuracy is usually
reported use temperature 0 and k = 1.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.tasks import SourceSection, TaskSection
from shoal.errors import UserError, user_path
from shoal.files import write_file
from shoal.tasks import Grade, Graders, Task
from shoal.tasks.compiling import content_id
from shoal.tasks.sources.reading import SourceReader

LONG, FLEXIBLE = 32_768, "flexible-extract"
# This prompt is from openai/simple-evals, `humaneval_eval.py`.
FUNCTION = (
    "Read the following function signature and docstring, and fully implement the function described. Your response should "
    "only contain the code for this function.\n{question}"
)
# This prompt is from Austin et al. 2021 (arXiv 2108.07732), section 3, without the few-shot examples. The question
# includes the tests.
TESTED = "You are an expert Python programmer, and here is your task: {question}\nAnswer with the code alone."
# This prompt follows LiveCodeBench's `lcb_runner/prompts/code_generation.py`. The question includes any starter code.
PROGRAM = (
    "You will be given a question (problem specification) and will generate a correct Python program that matches the "
    "specification and passes all tests.\n\nQuestion: {question}\n\nWithout starter code, read the inputs from stdin, solve "
    "the problem and write the answer to stdout (do not directly test on the sample inputs). Enclose your code within "
    "delimiters as follows.\n```python\n# YOUR CODE HERE\n```"
)


@dataclass(frozen=True)
class Suite:
    """A benchmark. `task`, `metric` and `filter` (how answers are extracted) are lm_eval's names.

    Only code suites have a `prompt`.
    """

    name: str
    about: str  # size and source
    task: str
    k: int = 1
    temperature: float = 0.0
    max_tokens: int = 2_048
    metric: str = "exact_match"
    filter: str = ""  # "" if the suite has only one filter
    prompt: str = ""  # contains {question}
    hub: str = ""  # org/name or org/name/config
    splits: str = "test"  # separated by spaces
    path: str = ""  # a local file or folder whose rows replace the hub's


TABLE = [
    Suite("AIME24", "30 problems, MAA 2024", "aime24", 16, 0.6, LONG),
    Suite("AIME25", "30 problems, MAA 2025", "aime25", 16, 0.6, LONG),
    Suite("MATH-500", "500 problems, Lightman et al. 2023 (arXiv 2305.20050)", "hendrycks_math500", 4, 0.6, LONG),
    Suite("GSM8K", "1,319 problems, Cobbe et al. 2021 (arXiv 2110.14168)", "gsm8k_cot_zeroshot", filter=FLEXIBLE),
    Suite(
        "GPQA-diamond",
        "198 questions, Rein et al. 2023 (arXiv 2311.12022); access must be requested on the hub",
        "gpqa_diamond_cot_zeroshot",
        4,
        0.6,
        LONG,
        filter=FLEXIBLE,
    ),
    Suite("MMLU-Pro", "12,032 questions, Wang et al. 2024 (arXiv 2406.01574)", "mmlu_pro"),
    Suite("IFEval", "541 prompts, Zhou et al. 2023 (arXiv 2311.07911)", "ifeval", metric="prompt_level_strict_acc"),
    Suite(
        "LiveCodeBench",
        "880 problems, release v5, Jain et al. 2024 (arXiv 2403.07974)",
        "shoal_livecodebench",
        4,
        0.6,
        LONG,
        prompt=PROGRAM,
        hub="livecodebench/code_generation_lite",
        splits="test test2 test3 test4 test5",
    ),
    Suite(
        "HumanEval",
        "164 functions, Chen et al. 2021 (arXiv 2107.03374)",
        "shoal_humaneval",
        prompt=FUNCTION,
        hub="openai/openai_humaneval",
    ),
    Suite(
        "MBPP",
        "500 functions, Austin et al. 2021 (arXiv 2108.07732)",
        "shoal_mbpp",
        prompt=TESTED,
        hub="google-research-datasets/mbpp/full",
    ),
]


def find(names: str) -> list[Suite]:
    """Return the suites with these comma-separated names, ignoring case. An unknown name is an lm_eval task.

    Raise UserError.
    """
    known = {suite.name.lower(): suite for suite in TABLE}
    requested = [name.strip() for name in names.split(",") if name.strip()]
    if not requested or len({name.lower() for name in requested}) < len(requested):
        raise UserError(
            f"name each suite once; choose from {', '.join(suite.name for suite in TABLE)}, or lm_eval's tasks"
        )
    return [known.get(name.lower()) or Suite(name, "", name, metric="") for name in requested]


# --- code -------------------------------------------------------------------------------------------------------------


def _sources(suite: Suite) -> list[tuple[SourceSection, str]]:
    """Return each source with its split. If `path` is a file, it is the whole suite, whatever the suite's splits."""
    if not suite.path:
        return [(SourceSection(name=suite.name, hub=suite.hub, reward="code"), split) for split in suite.splits.split()]
    splits = ["train"] if user_path(suite.path).is_file() else suite.splits.split()
    return [(SourceSection(name=suite.name, path=suite.path, reward="code"), split) for split in splits]


def read_tasks(suite: Suite, n: int) -> list[Task]:
    """Return a code suite's tasks, ordered by content hash, so that the first `n` are an unbiased sample.

    If `n` is 0, return all. Duplicates count once. Raise TasksNotFoundError or UserError.
    """
    tasks: dict[str, Task] = {}
    for source, split in _sources(suite):
        for fields in SourceReader(source, split):
            name = f"{suite.name}/{content_id(fields)}"
            tasks[name] = Task(name, fields.question, fields.answer, suite.name, fields.tests, fields.metadata)
    if n > len(tasks):
        raise UserError(f"{suite.name} has {len(tasks)} tasks, fewer than --n {n}")
    ordered = sorted(tasks.values(), key=lambda task: hashlib.sha256(f"shoal/eval/{task.id}".encode()).digest())
    return ordered[:n] if n else ordered


def write_task(suite: Suite, tasks: Sequence[Task], folder: Path) -> None:
    """Write a code suite as an lm_eval task that only generates completions."""
    rows = [{"message": suite.prompt.replace("{question}", task.question)} for task in tasks]
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{suite.task}.jsonl"
    write_file(data, "".join(json.dumps(row) + "\n" for row in rows).encode())
    task = {
        "task": suite.task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "message",
        "doc_to_target": "",
        "generation_kwargs": {"until": []},
        "metric_list": [{"metric": "bypass"}],
    }
    write_file(folder / f"{suite.task}.yaml", json.dumps(task, indent=1).encode())  # JSON is YAML


def grade(suite: Suite, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
    """Run each completion's program against its task's tests in the sandbox. Raise GradeError."""
    source, _ = _sources(suite)[0]
    with Graders(TaskSection(sources=[source])) as graders:
        return graders.grade(tasks, completions)
