"""Finds the program in a completion.

Invariant: linear in the completion's length, and nothing is parsed here: hostile source can crash a parser, so that
happens in the sandbox. Called by `reward.py`.
"""

FENCE = "```"
PYTHON = ("python", "python3", "py")


def program_of(completion: str) -> str:
    """The last fenced block marked as Python, or else the last fenced block, or else all of the text.

    A block that the completion does not close runs to its end.

    >>> program_of("Try this:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    >>> program_of("    return x")
    '    return x'
    """
    blocks: list[tuple[bool, list[str]]] = []
    inside = False
    for line in completion.splitlines(keepends=True):
        stripped = line.strip()
        if not stripped.startswith(FENCE):
            if inside:
                blocks[-1][1].append(line)
        elif inside:
            inside = False
        elif stripped.endswith(FENCE) and len(stripped) > 2 * len(FENCE):
            continue  # ```inline```
        else:
            inside = True
            blocks.append((stripped.strip("`").strip().lower() in PYTHON, []))
    if not blocks:
        return completion
    marked = [lines for python, lines in blocks if python]
    return "".join(marked[-1] if marked else blocks[-1][1])
