"""What must be equal at all sites of a run, each thing by its name, and who is refused because something differs.

Invariant: two that agree compute the same thing from the same data. Called by `meeting`, `pretrain` and `sft`.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from shoal.diloco.messages import MeetingError

FILES = {
    "model": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
}


def about_model(folder: Path) -> dict[str, str]:
    """Architecture and tokenizer of the model in this folder."""
    return {what: _digest([folder / name for name in names]) for what, names in FILES.items()}


def compare(name: str, about: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raises MeetingError, which names what differs, if a site trains something else than the run.

    Data come last: if the tokenizer differs, so may they.
    """
    for key in sorted({*ours, *about}, key=lambda key: (key == "data", key)):
        if ours.get(key) != about.get(key):
            raise MeetingError(
                f"{name} has another {key}: {_short(about.get(key))}, and the run has {_short(ours.get(key))}; "
                f"give every site the same {key}"
            )


def _digest(paths: list[Path]) -> str:
    found = sha256()
    for path in paths:
        if path.exists():
            found.update(path.name.encode() + sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _short(text: str | None) -> str:
    return "none" if text is None else text[:60]
