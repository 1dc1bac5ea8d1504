r"""The public benchmarks that `shoal eval` knows: where each is from, how it is asked, graded and sampled.

Invariant: a suite is data: a source of tasks, a prompt with {question}, a reward by name, and defaults. Rows become tasks as
everywhere (`tasks/sources/schemas.py`), so what is measured here can be trained on with the same words in a config.
Called by `evaluate` and the command line. To add a suite, add an entry.

Sampling: temperature 0.6 and 32,768 tokens are DeepSeek-R1's (arXiv 2501.12948, section 3), whose top-p of 0.95 is left out:
engines here sample from the full distribution. Suites that are usually reported greedily have k = 1 and temperature 0.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.tasks import SourceSection
from shoal.evals.completions import EvalUsageError
from shoal.tasks.compiling import content_id
from shoal.tasks.sources.reading import Reading
from shoal.tasks.task import Task

# The README of DeepSeek-R1 and of Qwen2.5-Math.
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."

# openai/simple-evals, `common.py`: QUERY_TEMPLATE_MULTICHOICE.
CHOICE = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n{question}"
)
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


@dataclass(frozen=True)
class Suite:
    name: str
    about: str  # size and paper
    hub: str  # org/name or org/name/config
    splits: tuple[str, ...]
    prompt: str
    reward: str
    k: int
    temperature: float
    max_tokens: int
    revision: str = ""  # empty: the newest, whose tasks' digest is recorded


LONG = 32_768
TABLE = [
    Suite("AIME24", "30 problems, MAA 2024", "HuggingFaceH4/aime_2024", ("train",), BOXED, "math", 16, 0.6, LONG),
    Suite("AIME25", "30 problems, MAA 2025", "yentinglin/aime_2025", ("train",), BOXED, "math", 16, 0.6, LONG),
    Suite(
        "MATH-500",
        "500 problems, Lightman et al. 2023 (arXiv 2305.20050)",
        "HuggingFaceH4/MATH-500",
        ("test",),
        BOXED,
        "math",
        4,
        0.6,
        LONG,
    ),
    Suite(
        "GSM8K",
        "1,319 problems, Cobbe et al. 2021 (arXiv 2110.14168)",
        "openai/gsm8k/main",
        ("test",),
        BOXED,
        "math",
        1,
        0.0,
        2_048,
    ),
    Suite(
        "GPQA-diamond",
        "198 questions, Rein et al. 2023 (arXiv 2311.12022); access must be asked for on the hub",
        "Idavidrein/gpqa/gpqa_diamond",
        ("train",),
        CHOICE,
        "choice",
        4,
        0.6,
        LONG,
    ),
    Suite(
        "LiveCodeBench",
        "880 problems, release v5, Jain et al. 2024 (arXiv 2403.07974)",
        "livecodebench/code_generation_lite",
        ("test", "test2", "test3", "test4", "test5"),
        PROGRAM,
        "code",
        4,
        0.6,
        LONG,
    ),
    Suite(
        "HumanEval",
        "164 functions, Chen et al. 2021 (arXiv 2107.03374)",
        "openai/openai_humaneval",
        ("test",),
        FUNCTION,
        "code",
        1,
        0.0,
        2_048,
    ),
    Suite(
        "MBPP",
        "500 functions (257 in config sanitized), Austin et al. 2021 (arXiv 2108.07732)",
        "google-research-datasets/mbpp/full",
        ("test",),
        TESTED_FUNCTION,
        "code",
        1,
        0.0,
        2_048,
    ),
    Suite(
        "IFEval",
        "541 prompts, Zhou et al. 2023 (arXiv 2311.07911)",
        "google/IFEval",
        ("train",),
        "{question}",
        "instructions",
        1,
        0.0,
        2_048,
    ),
]
SUITES = {suite.name: suite for suite in TABLE}


def find(names: str) -> list[Suite]:
    """The suites of a list of names with commas, in any case. Raises EvalUsageError."""
    by_name = {name.lower(): suite for name, suite in SUITES.items()}
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in by_name:
            raise EvalUsageError(f"no suite {name!r}; there are {', '.join(SUITES)}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise EvalUsageError(f"name each suite once, out of {', '.join(SUITES)}")
    return [by_name[name] for name in wanted]


def sources(suite: Suite, path: str = "") -> list[tuple[SourceSection, str]]:
    """Each of a suite's sources and its split: on the hub, or a file or folder of the same rows."""
    common: dict[str, Any] = {"name": suite.name, "reward": suite.reward, "prompt": suite.prompt}
    if path:
        whole = Path(path).expanduser().is_file()  # one file is all of the suite, whatever split it says it is
        return [(SourceSection(path=path, **common), split) for split in (("train",) if whole else suite.splits)]
    return [(SourceSection(hub=suite.hub, revision=suite.revision, **common), split) for split in suite.splits]


def read(suite: Suite, path: str = "", n: int = 0) -> list[Task]:
    """A suite's tasks in the order of a hash of their ids, so that the first `n` are a fair sample; 0: all.

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


def digest(tasks: Sequence[Task]) -> str:
    """Names the tasks; an id is a hash of the task's content."""
    return hashlib.sha256("\n".join(task.id for task in tasks).encode()).hexdigest()
