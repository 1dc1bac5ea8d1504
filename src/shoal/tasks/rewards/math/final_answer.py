r"""The final answer in a completion, as text: what the math reward compares with the gold answer.

Invariant: a completion has at most one final answer, and its last `CONSIDERED` characters alone say which. So several
guesses are not several tries. In this order:

1. Text after the last `</think>`, if there is one, is all that counts.
2. The last `\boxed{...}`. If it is empty, has no braces or never closes, there is no answer.
3. What follows the last "answer is", "answer:" or "####".
4. The whole text, if it is mathematics without prose.
5. Of formulas in `$...$`, `\(...\)`, `\[...\]` and numbers in prose: the last.

Called by the math reward. It runs in the caller, so every step is linear in the text. Left out: parsing (`equality.py`).
"""

import re

CONSIDERED = 10_000  # characters, from the end; also of an answer of 10 MB
MARK = re.compile(r"####|\banswer\b(?:[ \w]{0,40}?\bis\b|[ \w]{0,40}?[:=]|\*\*:?)[:* ]*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?=\s|\*|$)|\n")
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\*?\s*\{[^{}]{0,200}\}")
COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"[^\W\d_]{2,}")
MATHS_WORDS = {*("and", "or", "pi", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "inf", "infinity", "percent")}
NUMBER = re.compile(
    r"(?<![\w.,/])(?:(?<![)\]])[-\u2212])?[$€£]?(?:\d{1,3}(?:,\d{3}){1,99}(?!\d)|\d{1,2000})(?:\.\d{1,2000})?(?:/\d{1,2000})?%?"
)


def final_answer(completion: str) -> str | None:
    """None if there is none."""
    text = completion[-CONSIDERED:].rpartition("</think>")[2]
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if box >= 0:
        return tidy(braced(text, box) or "") or None
    marks = list(MARK.finditer(text))
    if marks:
        return _first(text[marks[-1].end() :])
    return _whole(text) or _last(text)


def tidy(answer: str) -> str:
    """Without what stands around an answer: spaces, math delimiters, markdown, a full stop."""
    before = None
    while before != answer:
        before = answer
        answer = answer.strip().strip("*`").rstrip(".,;:").strip()
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = answer[len(opening) : -len(closing)]
            if answer.startswith(opening) and answer.endswith(closing) and inner and opening not in inner:
                answer = inner
    return answer


def prose(text: str) -> bool:
    """Whether there are words in it, other than those of formulas and of `\\text{}`."""
    rest = COMMAND.sub(" ", TEXT.sub(" ", text))
    return any(word.lower() not in MATHS_WORDS for word in WORD.findall(rest))


def braced(text: str, at: int) -> str | None:
    """What the braces after `at` hold; None if nothing but space comes before them, or if they never close."""
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


def _first(text: str) -> str | None:
    """The answer right after a mark: the rest of its sentence, or the first formula or number in it."""
    text = text.lstrip(" *\n\t:")
    end = SENTENCE_END.search(text)
    sentence = text[: end.start()] if end else text
    if not prose(sentence):
        return tidy(sentence) or None
    found = [*_formulas(sentence), *_numbers(sentence)]
    return min(found)[2] if found else (tidy(sentence) or None)


def _whole(text: str) -> str | None:
    text = tidy(text)
    alone = any(map(str.isalnum, text)) and "\n" not in text and not prose(text) and not _formulas(text)
    return text if alone else None


def _last(text: str) -> str | None:
    found = [*_formulas(text), *_numbers(text)]
    return max(found, key=lambda one: one[1])[2] if found else None


Found = tuple[int, int, str]  # start, end, answer


def _numbers(text: str) -> list[Found]:
    return [(one.start(), one.end(), one.group()) for one in NUMBER.finditer(text)]


def _formulas(text: str) -> list[Found]:
    """As pandoc reads dollars: no space inside of them, no digit after the last, so that "$5 and $3" is not a formula."""
    found: list[Found] = []
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        at = text.find(opening)
        while at >= 0:
            start = at + len(opening)
            end = text.find(closing, start)
            if end < 0:
                break
            inner, after = text[start:end], end + len(closing)
            formula = bool(inner.strip()) and not prose(inner) and "\n\n" not in inner
            if opening == "$" and (inner[:1].isspace() or inner[-1:].isspace() or text[after : after + 1].isdigit()):
                formula = False
            if formula:
                found.append((at, after, tidy(inner)))
            at = text.find(opening, after if formula or opening != "$" else end)
    return [one for one in found if one[2]]
