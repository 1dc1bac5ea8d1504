"""What the model wrote: the newest sample completions, as a screen and as lines.

Invariant: control characters in a completion never reach the terminal. Called by the live view and `shoal run`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.text import Text

from shoal.protocol.history import RunHistory
from shoal.protocol.messages import WorkerSample
from shoal.watch.figures import clean, number

LINE = 160  # characters of a prompt or completion in one line of a log
MOST = 20  # samples on a screen


def sample_lines(samples: Sequence[WorkerSample]) -> list[str]:
    """One line per sample, for logs: reward, prompt and completion."""
    return [
        f"completion by {sample.worker}, version {sample.policy_version}, reward {number(sample.reward)}: "
        f"{_one_line(sample.prompt)} → {_one_line(sample.completion)}"
        for sample in samples
    ]


@dataclass(frozen=True)
class SampleScreen:
    """The newest completions, newest first, as many as the console has room for."""

    history: RunHistory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_height if console.is_terminal else 10_000
        title = Text("newest sample completions   s: back to the run", style="dim")
        panels: list[Panel] = []
        room -= 1
        for sample in reversed(self.history.samples[-MOST:]):
            panel = _panel(sample)
            room -= len(console.render_lines(panel, options.update(height=None), pad=False))
            if room < 0 and panels:
                break
            panels.append(panel)
        rest = [] if panels else [Text("none yet: validators send one per accepted group")]
        yield from console.render(Group(title, *panels, *rest), options)


def _panel(sample: WorkerSample) -> Panel:
    title = f"{sample.worker}  version {sample.policy_version}  reward {number(sample.reward)}  {sample.tokens} tokens"
    content = Group(Text(_lines(sample.prompt), style="dim"), Text(_lines(sample.completion)))
    return Panel(content, title=clean(title), title_align="left", border_style="dim", padding=(0, 1))


def _lines(text: str) -> str:
    return "\n".join(clean(line) for line in text.splitlines())


def _one_line(text: str) -> str:
    line = repr(text)[1:-1]
    return line if len(line) <= LINE else f"{line[: LINE // 2]} … {line[-LINE // 2 :]}"
