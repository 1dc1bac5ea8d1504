"""Seeded random answers that a hostile or confused model may give to a mathematics problem."""

from collections.abc import Iterator
from random import Random

SEEDS = [
    "18", "-0", "1,234.50", "018", r"\frac{1}{2}", r"\frac12", "50\\%", r"\sqrt{8}", "2\\pi", "x^2+2x+1", r"\{1,2,3\}",
    "[1,2)",
    r"(-\infty,2]\cup(3,\infty)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\text{Tuesday}", "x=5", r"1.5\times 10^{3}",
    r"\int_0^1 x^2 dx", r"\sum_{n=1}^{100} \frac{1}{n^2}", r"\lim_{x\to 0}\frac{\sin x}{x}", r"\binom{10}{5}", "5!",
    r"\log_2 8", r"e^{i\pi}", r"\frac{d}{dx} x^x", r"x\in\mathbb{R}", "1<x<2", "3:4", r"\left|x-1\right|",
    r"\lfloor 2.5\rfloor",
    r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\gcd(12,18)", r"7 \bmod 3", r"\prod_{k=1}^{20} k", r"\sqrt[3]{27}",
]  # fmt: skip
PIECES = [
    "^", "_", "{", "}", "(", ")", "[", "]", "\\", "$", "&", "%", ",", ";", "=", "<", "!", "!!", "|", "-", "+", "/", "*", ".",
    " ", "\n", "\0", "\ud800", "٣", "½", "−", "\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\left(", "\\right)", "\\infty",
    "\\cdot", "\\sum_{n=1}^{", "\\int_0^", "\\begin{matrix}", "\\end{matrix}", "__import__('os').system('true')", "9^9^9",
    "e", "i", "\\pi", "1e999", "E",
]  # fmt: skip


def fuzzed(random: Random) -> str:
    """Return one answer, without a box around it."""
    return random.choice([mutated, mutated, mutated, mutated, deep, power, long, noise])(random)


def mutated(random: Random) -> str:
    text = random.choice(SEEDS)
    for _ in range(random.randint(1, 8)):
        at, piece = random.randint(0, len(text)), random.choice(PIECES + SEEDS)
        text = text[:at] + piece + text[at + random.choice([0, 0, 1, 3]) :]
    return text


def deep(random: Random) -> str:
    pairs = [("(", ")"), ("{", "}"), ("[", "]"), (r"\frac{1}{1+", "}"), (r"\sqrt{", "}"), ("2^{", "}")]
    opening, closing = random.choice([*pairs, (r"\{", r"\}"), ("|", "|")])
    depth = random.choice([2, 10, 25, 31, 300, 3000])
    return opening * depth + random.choice(SEEDS) + closing * random.choice([depth, depth, depth - 1, 0])


def power(random: Random) -> str:
    def number() -> str:
        return random.choice(
            ["9", "99", "10^9", "(9!)", "x", "2.5", "-7", r"\pi", "1e9", r"\frac{1}{9}", "(x+1)", "(1+i)"]
        )

    tower = "^{".join(number() for _ in range(random.randint(2, 6)))
    tower += "}" * tower.count("^{")
    return random.choice(
        [tower, f"({tower})!", rf"\sqrt{{{tower}}}", rf"{tower}-{tower}", rf"\log({tower})", rf"\sin({tower})"]
    )


def long(random: Random) -> str:
    count = random.choice([20, 50, 50, 100, 100, 100, 200, 200, 990, 5000])
    pieces = ["7", "1,", "x+", "x*", "2^", "(x+1)", "-", "+-", r"\frac", "!", "&", r"\\", "1/", "x_", "a", r"\pm 1,"]
    sequence = random.choice([*pieces, "1=", "1<"])
    return sequence * (count // len(sequence)) + random.choice(["", "1", "x"])


def noise(random: Random) -> str:
    return "".join(
        random.choice(PIECES) if random.random() < 0.5 else chr(random.randrange(1, 0x3000))
        for _ in range(random.randint(1, 80))
    )


def answers(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of a gold answer and a completion."""
    random = Random(seed)
    for _ in range(count):
        answer = fuzzed(random)
        completion = random.choice([rf"\boxed{{{answer}}}", f"The answer is {answer}", f"${answer}$", answer])
        yield random.choice(SEEDS), completion
