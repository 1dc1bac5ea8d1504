"""A whole run as one HTML file: the dashboard's own page with its data inside.

Invariant: the file opens from disk and asks nothing of any network; its policy allows the scripts and styles in it by their
digests, and no others; every text of the run is data; no key, address or invite is in it.
Left out: what is only live (the queue).
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.files import write_file
from shoal.watch.page.files import SHARED
from shoal.watch.page.server import STATIC, Dashboard
from shoal.watch.page.work import submissions, timeline
from shoal.watch.run import FolderRun, Run

START, CHARSET = "main.js", '<meta charset="utf-8">'
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
BARS = 400  # newest submissions in a report's timeline


def write_page(folder: Path, others: Sequence[Path], out: Path) -> None:
    """Write the page of the run in `folder`, with the curves of other runs in it. Raises UserError, OSError."""
    write_file(out, page(answers(FolderRun(folder), [FolderRun(other) for other in others])).encode())


def answers(run: FolderRun, others: Sequence[Run] = ()) -> dict[str, Any]:
    """What the page asks the dashboard's server, answered, by path."""
    dashboard = Dashboard(run, others)
    found = {path: question({}) for path, question in dashboard.questions().items()}
    status = dashboard.look()
    begun_s = min((line["assigned_s"] for line in submissions(run.work())[-BARS:]), default=status.started_s)
    found["/api/timeline"] |= timeline(run, begun_s, status.now_s) | {"begun_s": begun_s}
    return found


def page(data: dict[str, Any]) -> str:
    """The dashboard's page with its files and these answers inside."""
    html = _read("dashboard.html")
    style = _read("theme.css") + _read("dashboard.css")
    theme, script = _read("theme.js"), bundle()
    picture = "data:image/svg+xml;base64," + base64.b64encode(_read("shoal.svg").encode()).decode()
    policy = (
        f"default-src 'none'; script-src {_digest(theme)} {_digest(script)}; style-src {_digest(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    told = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    html = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", html)
    html = html.replace(CHARSET, f'{CHARSET}\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    html = html.replace(
        '<script src="/assets/theme.js"></script>', f"<style>{style}</style>\n<script>{theme}</script>", 1
    )
    html = html.replace("/assets/shoal.svg", picture)
    return html.replace(
        f'<script type="module" src="/assets/{START}"></script>',
        f'<script type="application/json" id="answers">{told}</script>\n<script type="module">{script}</script>',
        1,
    )


def bundle() -> str:
    """All modules of the page as one, each in a function of its own: from disk, a browser loads no second module."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        source = _read(name)
        for _, other in IMPORT.findall(source):
            if other not in found:
                add(other)
        names = ", ".join(name for _, name in EXPORT.findall(source))
        source = EXPORT.sub(r"\1", IMPORT.sub(_constant, source))
        found[name] = f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {names} }};\n}})();'

    add(START)
    return "\n".join(["const modules = {};", *found.values()])


def _constant(match: re.Match[str]) -> str:
    """An import as a constant."""
    names, module = match.groups()
    return f'const {{{names.replace(" as ", ": ")}}} = modules["{module}"];'


def _read(name: str) -> str:
    """A static file, of the page or of all pages."""
    path = STATIC / name
    return (path if path.is_file() else SHARED / name).read_text()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
