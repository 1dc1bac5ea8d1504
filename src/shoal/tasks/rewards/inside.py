"""What runs inside the sandbox besides the model's code, as text: modules that a server compiles once for all programs.

Invariant: they import nothing of Shoal there, as the sandbox shows nothing of it. Called by `code.reward` and `own`.
"""

from pathlib import Path

HERE = Path(__file__).parent
RUN = "import inside; inside.main()"  # the program


def modules(name: str) -> dict[str, str]:
    """`wire`, and the module `name` as `inside`."""
    lines = (HERE / f"{name}.py").read_text().splitlines()
    own = [line.replace("from shoal.tasks.rewards.wire import", "from wire import") for line in lines]
    own = [line.replace("from shoal.sandbox import channel", "import channel") for line in own]
    return {"wire": (HERE / "wire.py").read_text(), "inside": "\n".join(own)}
