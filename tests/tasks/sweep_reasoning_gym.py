"""List and score every data set of reasoning-gym in one process: `python -P sweep_reasoning_gym.py ADAPTER_FILE`.

Write JSON lines for the adapter's tests. `evaluated`: whether the library, without the adapter, compiles an answer as code.
"""

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

SIZE = 3
MARK = "918273"
# Answers that may score 1 whatever the question is. QUESTION and OTHER are the question and another entry's answer.
CONSTANTS = [
    "0",
    "1",
    "-1",
    "nan",
    "inf",
    "-inf",
    "yes",
    "no",
    "True",
    "False",
    "None",
    "[]",
    "{}",
    "()",
    "A",
    "x",
    "?",
    "-",
]
CONSTANTS += ["2 + 9 + 6 + 7", "0 0 0", "[[]]", "(0, 0)", "1,2,3", "", "QUESTION", "OTHER", "wrong 7"]


def main() -> None:
    spec = importlib.util.spec_from_file_location("gym", Path(sys.argv[1]))
    assert spec is not None and spec.loader is not None
    gym = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gym)
    compiled: list[str] = []
    sys.addaudithook(lambda event, args: compiled.append(str(args[0])) if event == "compile" and args[0] else None)
    gym.REFUSED = set()
    out = sys.stdout
    sys.stdout = sys.stderr  # some data sets print
    for name in sorted(gym.DATASETS):
        options: dict[str, Any] = {"dataset": name, "size": SIZE}
        if name == "composite":
            options["datasets"] = [{"name": "chain_sum"}, {"name": "countdown", "weight": 2.0}]
        rows = gym.rows(options)
        values = [json.loads(row["metadata"]) | {"question": row["question"]} for row in rows]
        gym.prepare(json.dumps(values[0]["setting"]))
        entries = [gym.generate(gym.dataset, n) for n in range(SIZE)]
        compiled.clear()
        for answer in (MARK, f"{MARK} + 1", f"[{MARK}]"):
            with contextlib.suppress(Exception):  # an error does not matter, only the compiled texts do
                gym.dataset.score_answer(answer, entries[0])
        line = {
            "name": name,
            "evaluated": any(MARK in text for text in compiled),
            "same": [entry["question"] for entry in entries] == [row["question"] for row in rows],
            "gold": [scored(gym, value, row["answer"]) for value, row in zip(values, rows, strict=True)],
            "tagged": [
                scored(gym, value, f"<think>hm</think> It is <answer> {row['answer']} </answer>.")
                for value, row in zip(values, rows, strict=True)
            ],
            "constants": constants(gym, values, [row["answer"] for row in rows]),
            "wrong": [scored(gym, value, "wrong 7") for value in values],
        }
        print(json.dumps(line), file=out)  # noqa: T201


def constants(gym: Any, values: list[dict[str, Any]], golds: list[str]) -> list[str]:
    """Return the constants that score at least 0.9 on every entry, although the entries have different answers."""
    others = [*golds[1:], *golds[:1]]
    found = []
    for constant in CONSTANTS if len(set(golds)) > 1 else []:
        texts = {"QUESTION": [value["question"] for value in values], "OTHER": others}.get(
            constant, [constant] * len(values)
        )
        pairs = zip(values, texts, strict=True)
        if all(scored(gym, value, f"<answer>{text}</answer>")[0] >= 0.9 for value, text in pairs):
            found.append(constant)
    return found


def scored(gym: Any, value: dict[str, Any], completion: str) -> tuple[float, str]:
    result = gym.score(value | {"completion": completion})
    return result["score"], result.get("outcome", "graded")


if __name__ == "__main__":
    main()
