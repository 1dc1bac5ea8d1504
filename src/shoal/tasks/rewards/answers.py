r"""The final answer of a completion, and the reward `number`: 1 if this answer is the task's number, else 0.

Invariants: a completion has at most one final answer, so guessing several times does not help. It is taken from the
last `MAX_COMPLETION` characters, in time linear in them. A number is compared as canonical text, exactly and at any
length. If the task's answer has no number, every grade of `number` is a `grader_error`.

The final answer stands outside of thoughts (`visible`), in the last `<answer>` tag if there is one, before the next
question:

1. It is the content of the last `\boxed{...}`. Boxes joined to it by "and", "or" or a comma on the same line form one list
   with it. If the last box is empty, has no braces or never closes, there is no answer. A later "the final answer is"
   overrides the box.
2. Without a box, it is the value after the last "answer is", "answer:" or "####". A "####" before words is a heading.
3. Otherwise it is the whole text, if that is mathematics without prose, or else the last formula in math delimiters or
   environments, or the last number in prose.

A value that its own sentence denies, compares or doubts ("not 5", "at least 5", "5 or 6", "5 is wrong") is no answer.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from shoal.tasks.task import Grade, Task

MAX_COMPLETION = 10_000  # characters; of a longer completion, only the end is read
MARK = re.compile(r"####|\banswers?\b(?:[ \w]{0,40}?\b(?:is|are)\b|[ \w]{0,40}?[:=]|\*\*:?)[:* ]*", re.IGNORECASE)
FINAL = re.compile(r"\bfinal\s+answer\b[ \w]{0,40}?\bis\b[:* ]*", re.IGNORECASE)
CONDITION = re.compile(
    r"\b(?:if|whether|unless|suppose|assume|assuming|false|doubt|unlikely|impossible)\s+(?:that\s+)?(?:\w+\s+)?$",
    re.IGNORECASE,
)
ELSEWHERE = re.compile(r"\b(?:below|following|follows|given by)\W*$", re.IGNORECASE)  # a value follows the sentence
SENTENCE_END = re.compile(r"[.!?](?=\s|\*|$)|\n")
VERB = re.compile(r"\b(?:is|are|equals)\b", re.IGNORECASE)
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\*?\s*\{([^{}]{0,200})\}")
ANNOUNCED = re.compile(r"^\\text\s*\{[^{}]*(?:\b(?:is|are)|:)\s*\}")  # \boxed{\text{The answer is }5}
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]{1,20}\*?\}(?:\{[^{}]{0,20}\})?")
COMMAND = re.compile(r"\\[A-Za-z]+|\\.")
# Letters that touch an operator, a digit or a bracket are a product of symbols, as in xy+1.
WORD = re.compile(r"(?<![\w\\^+*/=<>-])[^\W\d_]{2,}(?![\w^+*/=<>({-])|[\u3040-\u9fff\uac00-\ud7a3]+")
TWO_LETTERS = frozenset("am an as at be by do go he if in is it me my no of on so to up us we".split())  # noqa: SIM905
MATHS_WORDS = frozenset("and or pi sin cos tan log ln exp sqrt inf infinity percent".split())  # noqa: SIM905
WHOLE = r"(?:\d{1,3}(?:,\d{3}){1,99}(?!\d)|\d{1,2000}(?:,\d{1,2}(?![\d,]))?|(?=\.\d))"
MULTIPLES = "dozen|hundred|thousand|[mbtr]{1,2}illion|squared|cubed|factorial"
NUMBER = re.compile(
    rf"(?<![\w.,/^])(?:\b(?:negative|minus) |(?<![)\]])[-\u2212])?[$€£]?{WHOLE}(?:\.\d{{1,2000}})?(?:[eE][-+]?\d{{1,3}}\b)?"
    rf"(?:/\d{{1,2000}})?(?:\^\{{?-?\d{{1,9}}\}}?)?%?(?![xyzn]\b|\d)(?: (?:{MULTIPLES})\b)*",
    re.ASCII,
)
OPERATION = re.compile(r"\s*(?:[A-Za-z/]+\s+){0,3}[-+*/=\u00d7\u00f7]")
NEXT_QUESTION = re.compile(r"(?<=\S)\s*\n(?:Question|Q):")
# A number for the reward `number`: a decimal, a fraction, a power or a multiple.
DIGITS = r"\d{1,3}(?:[, ]\d{3})+|\d+"
PLAIN = re.compile(rf"\+?([-\u2212]?) ?[$€£]?({DIGITS}|(?=\.\d))(\.\d*)?%?", re.ASCII)
FRACTION = re.compile(r"\\[dtc]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?", re.ASCII)
UNIT = re.compile(r"\\(?:text|mathrm)\s*\{[^{}\d]*\}(?:\s*\^\s*\{?\d\}?)?")
PARTS = re.compile(r"(\D*)([\d.,]+)(?:[eE]([-+]?\d+))?(?:/(\d+))?(?:\^\{?(-?\d+)\}?)?%?(?: (\w+))?", re.ASCII)
FACTORS = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
FORMULA = re.compile(
    r"\$\$((?:(?!\$\$).){1,1000})\$\$|\\\[((?:(?!\\[\[\]]).){1,1000})\\\]|\\\(((?:(?!\\[()]).){1,1000})\\\)|"
    r"(\\begin\{.{1,1000}?\\end\{[A-Za-z]{1,20}\*?\})|(?<!\\)\$((?:[^$\\]|\\.){1,1000})\$",
    re.DOTALL,
)
MAX_MARKS = 8  # because each may take time linear in the text
JOINED_CHARACTERS = 80
JOINED_WORDS = 2  # words allowed before "and", as in \boxed{1} red ball and \boxed{2} blue ones
Span = tuple[int, int, str]  # start, end, answer
# Words just before or after a value that deny it, compare it or name another one.
DENIED = r"(?:\bnot|\bnever|n't|cannot)(?: (?:be|equal|necessarily|exactly|to))*"
NOT_BEFORE = re.compile(
    rf"(?:(?P<denied>{DENIED}|\b(?:doubt|false|untrue|unlikely|impossible|wrong) that\b[\w ]{{0,30}})|"
    r"\b(?:than|at least|at most|up to|under|over|above|below|between|either|maybe|perhaps|possibly|anything but|exceeds?|"
    r"(?:twice|thrice|half|double|triple)(?: of)?)|[\w:] [$\\(]*[\d.,]+\)?\$?,? or)[\s$*(\\\[]*$",
    re.IGNORECASE,
)
NOT_AFTER = re.compile(
    rf"[\s$)\\\]]*(?:(?:is|was|are|does|can) ?{DENIED}|isn't|can't|cannot|,? ?(?:possibly|maybe|perhaps)\b|to \d|"
    r",? ?or (?:more|less|fewer|so|maybe|perhaps|possibly|[$\\]*\d)|"
    r"(?:is|was) (?:wrong|incorrect|false|impossible|too|my first)\b|"
    r"(?:more|less|fewer|greater|larger|smaller) than (?:[-$\\(\d]|\w\b)|times (?:the|as|that|its|(?!a\b)\w\b|[$\\]|\d))",
    re.IGNORECASE,
)


class Number:
    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        return [_grade(task, completion) for task, completion in zip(tasks, completions, strict=True)]

    def close(self) -> None:
        pass


def _grade(task: Task, completion: str) -> Grade:
    actual, expected = last_number(completion), last_number(task.answer)
    if expected is None:
        return Grade(0.0, "grader_error", f"the task's answer {task.answer[:40]!r} holds no number")
    if actual is None:
        return Grade(0.0, "wrong_format", "the final answer of the completion is not a number")
    return Grade(float(actual == expected), detail=f"{actual[:100]}, expected {task.answer[:100]}")


def final_answer(completion: str) -> str | None:
    """Return the final answer, or None if there is none."""
    text = NEXT_QUESTION.split(visible(completion[-MAX_COMPLETION:]))[0]
    tagged = text.rpartition("<answer>")[2].partition("</answer>")
    text = tagged[0] if tagged[1] else text
    boxes = [match.start() for match in re.finditer(r"\\(?:boxed|fbox)", text)]
    if boxes:
        override = list(FINAL.finditer(text, boxes[-1]))
        return (override and _after_mark(text[override[-1].end() :], numbers_only=True)) or _boxed(text, boxes)
    for mark in reversed(list(MARK.finditer(text))[-MAX_MARKS:]):
        line = text[mark.end() :].partition("\n")[0]
        heading = mark[0] == "####" and (prose(line) or not line.strip())
        if heading or CONDITION.search(text[: mark.start()][-40:]):
            continue
        if (answer := _after_mark(text[mark.end() :])) is not None:
            return answer or None
    whole = tidy(text)
    if any(map(str.isalnum, whole)) and not (prose(whole) or "\n" in whole or _formulas(whole)):
        return whole
    return _undenied(text, _spans(text)[-1:]) or None


def tidy(answer: str) -> str:
    """Strip surrounding spaces, math delimiters, markdown and final punctuation."""
    before = None
    while before != answer:
        before = answer
        answer = answer.replace('\\"', '"').strip().strip('*`"').rstrip(".,;:").strip()
        formula = FORMULA.fullmatch(answer)
        answer = answer if formula is None or formula[4] else formula[formula.lastindex or 0]
    return answer


def prose(text: str) -> bool:
    """Return whether `text` has words outside of formulas and of `\\text{}`."""
    rest = COMMAND.sub(" ", ENVIRONMENT.sub(" ", TEXT.sub(" ", text)))
    words = (word.lower() for word in WORD.findall(rest))
    return any(word in TWO_LETTERS if len(word) == 2 and word.isascii() else word not in MATHS_WORDS for word in words)


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
        inner = braced(text[:next_start], at)
        end = text.index("{", at) + len(inner) + 2 if inner is not None else 0
        if inner is None or answers and not _joins(text[end:next_start]):
            break
        if not answers and _undenied(text, [(at, end, "x")], compared=False) == "":
            return None
        answers.append(tidy(ANNOUNCED.sub("", inner)))
        next_start = at
    return ", ".join(dict.fromkeys(reversed(answers))) or None


def _joins(between: str) -> bool:
    """Return whether the text between two boxes makes them one list."""
    if len(between) > JOINED_CHARACTERS or re.search(r"\n|\b(?:no|not|wait)\b", between):
        return False
    plain = COMMAND.sub(" ", TEXT.sub(r" \1 ", between))
    joined = list(re.finditer(r"\b(?:and|or)\b|[,;&]", plain))
    if not joined:
        return not WORD.search(plain) and "." not in plain
    before, after = plain[: joined[0].start()], plain[joined[-1].end() :]
    words = WORD.findall(before)
    return len(words) <= JOINED_WORDS and not VERB.search(before) and not WORD.search(after) and "." not in plain


def _after_mark(text: str, numbers_only: bool = False) -> str | None:
    """Return the value after a mark such as "answer is", "" if the sentence denies it, None if there is no answer."""
    text = re.sub(r"\([^()]*\)", lambda aside: " " * len(aside[0]) if prose(aside[0]) else aside[0], text).lstrip(
        " *\n\t:"
    )
    formulas = _formulas(text)
    block = next((formula for formula in formulas if formula[0] == 0), None)
    cut = SENTENCE_END.search(text, block[1] if block else 0)
    sentence = text[: cut.start()] if cut else text
    if cut and cut[0] == "?":
        return None  # a question
    if not prose(sentence):
        answer = tidy(sentence)
        return answer or None if not numbers_only or any(map(str.isdigit, answer)) else None
    if ELSEWHERE.search(sentence):
        return None if numbers_only else _after_mark(text[len(sentence) :].lstrip(".:"))
    spans = [span for span in _spans(text) if span[1] <= len(sentence)]
    if not spans:
        return None if numbers_only else tidy(sentence) or None
    # In "the value of $x$ is 3" the answer follows the verb. But if the sentence starts with a
    # number, that number is the answer, whatever verb follows.
    if block is not None or spans[0][0] > 0:
        verbs = [
            verb
            for verb in VERB.finditer(sentence)
            if not any(start <= verb.start() < end for start, end, _ in formulas)
        ]
        spans = [span for span in spans if verbs and span[0] >= verbs[0].end()] or spans
    if OPERATION.match(sentence, spans[0][1]) and "=" in sentence:  # "Answer: 3 boxes * 4 = 12 pens"
        spans = [span for span in spans if span[0] > sentence.rindex("=")] or spans
    return _undenied(sentence, spans[:1])


def _undenied(text: str, spans: list[Span], compared: bool = True) -> str | None:
    """Return the value of the only span, "" if the words around it deny or compare it, None if there is no span."""
    for start, end, value in spans:
        before = NOT_BEFORE.search(text[max(0, start - 40) : start])
        denied = NOT_AFTER.match(text[end : end + 40]) or before and (compared or before["denied"])
        return "" if denied else value
    return None


def _spans(text: str) -> list[Span]:
    """Return the formulas and numbers, by their ends."""
    numbers = [(match.start(), match.end(), match[0]) for match in NUMBER.finditer(text) if match[0]]
    return sorted([*_formulas(text), *numbers], key=lambda span: span[1])


def _formulas(text: str) -> list[Span]:
    spans: list[Span] = []
    at = 0
    while match := FORMULA.search(text, at):
        inner, in_dollars = match[match.lastindex or 0], match.lastindex == 5
        # As in pandoc, a formula in dollar signs has no space at its ends and no digit after it.
        spaced = inner != inner.strip() and not COMMAND.search(inner.replace("\\$", ""))
        money = spaced or text[match.end() : match.end() + 1].isdigit() or prose(inner) and " " in inner.strip()
        is_formula = bool(tidy(inner)) and "\n\n" not in inner and not (in_dollars and money)
        if is_formula:
            spans.append((match.start(), match.end(), tidy(inner)))
        at = match.end() if is_formula else match.end() - 1 if in_dollars else match.start() + 1
    return spans


def visible(completion: str) -> str:
    """Return a completion without its thoughts, which end with the last `</think>`, or never after an open `<think>`."""
    before, tag, after = completion.rpartition("</think>")
    return (after if tag else completion).partition("<think>")[0]


def last_number(text: str) -> str | None:
    r"""Return the final answer of a text as a canonical number; None if it is not one number.

    >>> last_number("She pays $1,250.50."), last_number(r"\\boxed{018} of 20"), last_number(r"\\boxed{3 or 4}")
    ('1250.5', '18', None)
    """
    answer = (final_answer(text) or "").replace("{,}", ",").replace("\\$", "").rpartition("=")[2]
    answer = FRACTION.sub(r"\1/\2", UNIT.sub("", answer)).strip(" {}")
    numbers = [match[0] for match in NUMBER.finditer(answer) if match[0]]
    if (plain := canonical(answer)) is not None or len(numbers) != 1:
        return plain
    parts = PARTS.fullmatch(numbers[0])
    if parts is None or parts[6] and parts[6] not in FACTORS:
        return None
    sign, base, exponent, below, power, factor = parts.groups()
    sign = "-" if re.search("[-\u2212mn]", sign) else ""
    if (plain := canonical(base)) is None or not (exponent or below or power or factor):
        return plain and canonical(sign + plain)
    size = (len(plain) + abs(int(exponent or 0)) + len(below or "")) * max(abs(int(power or 1)), 1)
    if size > 1_000 or below is not None and not int(below) or plain == "0":
        return None
    value = (Fraction(plain) * Fraction(10) ** int(exponent or 0) / int(below or 1)) ** int(power or 1) * FACTORS.get(
        factor, 1
    )
    places = next((places for places in range(20) if (value * 10**places).denominator == 1), None)
    if places is None:
        return f"{sign}{value}"
    digits = f"{int(value * 10**places):0{places + 1}d}"
    return canonical(f"{sign}{digits[: len(digits) - places]}.{digits[len(digits) - places :]}")


def canonical(text: str) -> str | None:
    """Return a plain number as canonical text, because int() refuses long ones and float() rounds; None for other text."""
    match = PLAIN.fullmatch(text.strip())
    if match is None:
        return None
    whole, part = re.sub("[, ]", "", match[2]).lstrip("0") or "0", (match[3] or "").rstrip("0")
    value = (whole + part).removesuffix(".")
    return f"-{value}" if match[1] and value != "0" else value
