r"""The reward `math`: 1 if the final answer of a completion equals the gold answer as mathematics, else 0.

Invariants: a completion has at most one final answer, so guessing several times does not help. It is taken from the
last `MAX_COMPLETION` characters. A grade depends only on the gold answer and these characters. Each comparison runs in
its own child process with a limit on CPU time (`inside/equality.py`), so no answer hangs or kills a run, and load
changes no score.
Outcomes: `graded`; `wrong_format` if the completion has no final answer; `grader_error` if the comparison exceeded a
limit, or if its process died or raised.

How the final answer is chosen:

1. If there is a `</think>`, only the text after the last one counts.
2. The answer is the content of the last `\boxed{...}`. Boxes joined to it by "and", "or" or a comma on the same line
   form one list with it. If the last box is empty, has no braces or never closes, there is no answer. A later "the
   final answer is" overrides the box.
3. Without a box, it is the text after the last "answer is", "answer:" or "####".
4. Otherwise it is the whole text, if that is mathematics without prose.
5. Otherwise it is the last formula in math delimiters or environments, or the last number in prose.

This runs in the caller, so every step takes time linear in the text. math-verify's own extraction is not used, because it
takes the first of two guesses ("3 or 5" becomes 3) and half of an interval.
Left out: partial credit, proofs, answers that say the same in other words.
"""

import re
from collections.abc import Sequence
from typing import Any

from shoal.sandbox import Budget, ProgramLimits
from shoal.tasks.inside import Grader, source
from shoal.tasks.task import Grade, Task

EQUALITY = source("equality")
CPU_S = 1.0
WALL_S = 60.0  # long, so that load changes no score; the limit on CPU time ends a comparison first
MEMORY_BYTES = 512 << 20
MAX_GOLD = 1_000  # characters that `equality` reads
UNCLOSED = re.compile(r"^\\+boxed\s*\{(?!.*\}\s*$)", re.DOTALL)  # the open box of a gold answer that was cut off
INTEGER = re.compile(r"([-\u2212]?)\$?(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?", re.ASCII)
MAX_COMPLETION = 10_000  # characters; of a longer completion, only the end is read
MARK = re.compile(r"####|\banswers?\b(?:[ \w]{0,40}?\b(?:is|are)\b|[ \w]{0,40}?[:=]|\*\*:?)[:* ]*", re.IGNORECASE)
FINAL = re.compile(r"\bfinal\s+answer\b[ \w]{0,40}?\bis\b[:* ]*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?=\s|\*|$)|\n")
VERB = re.compile(r"\b(?:is|are|equals)\b", re.IGNORECASE)
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\*?\s*\{([^{}]{0,200})\}")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]{1,20}\*?\}(?:\{[^{}]{0,20}\})?")
COMMAND = re.compile(r"\\[A-Za-z]+|\\.")
# Letters that touch an operator, a digit or a bracket are a product of symbols, as in xy+1.
WORD = re.compile(r"(?<![\w\\^+*/=<>-])[^\W\d_]{2,}(?![\w^+*/=<>({-])")
TWO_LETTERS = frozenset("am an as at be by do go he if in is it me my no of on so to up us we".split())  # noqa: SIM905
MATHS_WORDS = frozenset("and or pi sin cos tan log ln exp sqrt inf infinity percent".split())  # noqa: SIM905
NUMBER = re.compile(
    r"(?<![\w.,/^])(?:(?<![)\]])[-\u2212])?[$€£]?(?:\d{1,3}(?:,\d{3}){1,99}(?!\d)|\d{1,2000}(?:,\d{1,2}(?![\d,]))?|(?=\.\d))"
    r"(?:\.\d{1,2000})?(?:/\d{1,2000})?(?:\^\{?-?\d{1,9}\}?)?%?(?![xyzn]\b)"
)
DELIMITERS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("\\begin{", "\\end{"), ("$", "$"))
JOINED_CHARACTERS = 80
JOINED_WORDS = 2  # words allowed before "and", as in \boxed{1} red ball and \boxed{2} blue ones
Span = tuple[int, int, str]  # start, end, answer


class Math:
    """The reward `math`. Its processes start with the first comparison and end with `close`."""

    def __init__(self, budget: Budget | None = None, *, cpu_s: float = CPU_S, size: int = 1) -> None:
        limits = ProgramLimits(WALL_S, cpu_s, MEMORY_BYTES)
        self.grader = Grader("math", EQUALITY, "judge", limits, size=size, prepare="prepare()", budget=budget)

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        answers = [final_answer(completion) for completion in completions]
        pairs = [(_gold(task), answer or "") for task, answer in zip(tasks, answers, strict=True)]
        at_sight = {pair: _grade_at_sight(*pair) for pair in pairs}
        undecided = [pair for pair, grade in at_sight.items() if grade is None]  # equal pairs are compared once
        compared = dict(zip(undecided, self.grader.grades([list(pair) for pair in undecided], _grade), strict=True))
        return [at_sight[pair] or compared[pair] for pair in pairs]

    def close(self) -> None:
        self.grader.close()


def _grade(result: Any) -> Grade:
    equal, detail = result
    return Grade(float(equal), detail=detail)


def _gold(task: Task) -> str:
    is_solution = "\\boxed" in task.answer or len(task.answer) > MAX_GOLD  # a derivation that ends with the answer
    answer = final_answer(task.answer) if is_solution else None
    return answer or tidy(UNCLOSED.sub("", task.answer.removeprefix("####")))


def _grade_at_sight(gold: str, answer: str) -> Grade | None:
    """Return the grade if an answer is missing, the texts are equal or both are whole numbers; otherwise None."""
    if not gold:
        return Grade(0.0, "grader_error", "the task has no gold answer")
    if not answer:
        return Grade(0.0, "wrong_format", "no final answer in the completion")
    if gold == answer:
        return Grade(1.0, detail="same text")
    whole = [_integer(gold), _integer(answer)]
    return None if None in whole else Grade(float(whole[0] == whole[1]))


def _integer(text: str) -> str | None:
    """Return a whole number as canonical text, because int() refuses long ones; None for other text."""
    match = INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match[1] and digits != "0" else digits


# --- the final answer ------------------------------------------------------------------------------------------------


def final_answer(completion: str) -> str | None:
    """Return the final answer, or None if there is none."""
    text = completion[-MAX_COMPLETION:].rpartition("</think>")[2]
    boxes = [match.start() for match in re.finditer(r"\\(?:boxed|fbox)", text)]
    if boxes:
        override = list(FINAL.finditer(text, boxes[-1]))
        return (override and _after_mark(text[override[-1].end() :], numbers_only=True)) or _boxed(text, boxes)
    marks = list(MARK.finditer(text))
    if marks:
        return _after_mark(text[marks[-1].end() :])
    return _whole(text) or _last(text)


def tidy(answer: str) -> str:
    """Strip surrounding spaces, math delimiters, markdown and final punctuation."""
    before = None
    while before != answer:
        before = answer
        answer = answer.replace('\\"', '"').strip().strip('*`"').rstrip(".,;:").strip()
        for opening, closing in DELIMITERS:
            inner = answer[len(opening) : -len(closing)]
            if opening != "\\begin{" and answer.startswith(opening) and answer.endswith(closing) and inner:
                answer = inner if opening not in inner else answer
    return answer


def prose(text: str) -> bool:
    """Return whether `text` has words outside of formulas and of `\\text{}`."""
    rest = COMMAND.sub(" ", ENVIRONMENT.sub(" ", TEXT.sub(" ", text)))
    words = (word.lower() for word in WORD.findall(rest))
    return any(word in TWO_LETTERS if len(word) == 2 else word not in MATHS_WORDS for word in words)


def braced(text: str, at: int) -> str | None:
    """Return the content of the braces after the command at `at`; None if other text precedes them or they never close."""
    start = text.find("{", at)
    if start < 0 or text[at:start].strip() not in ("\\boxed", "\\fbox"):
        return None
    depth = 0
    for end in range(start, len(text)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
        if depth == 0:
            return text[start + 1 : end]
    return None


def _boxed(text: str, boxes: list[int]) -> str | None:
    """Return the content of the last box and of the boxes joined to it, separated by commas."""
    answers: list[str] = []
    next_start = len(text)
    for at in reversed(boxes):
        inner = braced(text[: next_start if answers else len(text)], at)
        if inner is None:
            break
        end = text.index("{", at) + len(inner) + 2
        if answers and not _joins(text[end:next_start]):
            break
        answers.append(tidy(inner))
        next_start = at
    return ", ".join(dict.fromkeys(reversed(answers))) or None


def _joins(between: str) -> bool:
    """Return whether the text between two boxes makes them one list."""
    if len(between) > JOINED_CHARACTERS or "\n" in between:
        return False
    plain = COMMAND.sub(" ", TEXT.sub(r" \1 ", between))
    joined = list(re.finditer(r"\b(?:and|or)\b|[,;&]", plain))
    if not joined:
        return not WORD.search(plain) and "." not in plain
    before, after = plain[: joined[0].start()], plain[joined[-1].end() :]
    words = WORD.findall(before)
    return len(words) <= JOINED_WORDS and not VERB.search(before) and not WORD.search(after) and "." not in plain


def _after_mark(text: str, numbers_only: bool = False) -> str | None:
    """Return the answer after a mark such as "answer is": the rest of the sentence, or a formula or number in it."""
    text = text.lstrip(" *\n\t:")
    formulas = _formulas(text)
    block = next((formula for formula in formulas if formula[0] == 0), None)
    cut = SENTENCE_END.search(text, block[1] if block else 0)
    sentence = text[: cut.start()] if cut else text
    if not prose(sentence):
        answer = tidy(sentence)
        return answer or None if not numbers_only or any(map(str.isdigit, answer)) else None
    spans = sorted([*(span for span in formulas if span[1] <= len(sentence)), *_numbers(sentence)])
    if not spans:
        return None if numbers_only else tidy(sentence) or None
    # In "the value of $x$ is 3" the answer follows the verb. But if the sentence starts with a
    # number, that number is the answer, whatever verb follows.
    if block is not None or spans[0][0] > 0:
        inside = [(start, end) for start, end, _ in formulas]
        for verb in VERB.finditer(sentence):
            if not any(start <= verb.start() < end for start, end in inside):
                spans = [span for span in spans if span[0] >= verb.end()] or spans
                break
    return spans[0][2]


def _whole(text: str) -> str | None:
    text = tidy(text)
    is_formula = any(map(str.isalnum, text)) and "\n" not in text and not prose(text) and not _formulas(text)
    return text if is_formula else None


def _last(text: str) -> str | None:
    spans = [*_formulas(text), *_numbers(text)]
    return max(spans, key=lambda span: span[1])[2] if spans else None


def _numbers(text: str) -> list[Span]:
    return [(match.start(), match.end(), match.group()) for match in NUMBER.finditer(text) if match.group()]


def _formulas(text: str) -> list[Span]:
    spans: list[Span] = []
    masked = text.replace("\\$", "  ")  # an escaped dollar sign is no delimiter
    for opening, closing in DELIMITERS:
        at = masked.find(opening)
        while at >= 0:
            start = at + len(opening)
            end = masked.find(closing, start)
            if end < 0:
                break
            inner, after = text[start:end], end + len(closing)
            formula = bool(inner.strip()) and "\n\n" not in inner
            if opening == "\\begin{":
                after = text.find("}", end) + 1
                formula, inner = after > 0, text[at:after]
            elif opening == "$":
                formula = formula and _in_dollars(inner, text[after : after + 1])
            if formula:
                spans.append((at, after, tidy(inner)))
            at = masked.find(opening, after if formula or opening != "$" else end)
    return [span for span in spans if span[2]]


def _in_dollars(inner: str, after: str) -> bool:
    """Return whether dollar signs enclose a formula. As in pandoc, it has no space at its ends and no digit after it."""
    if (inner[:1].isspace() or inner[-1:].isspace()) and not COMMAND.search(inner.replace("\\$", "")):
        return False
    return not after.isdigit() and not (prose(inner) and " " in inner.strip())
