"""A whole run as one HTML file: the dashboard's own page with its data embedded.

Invariant: the file opens from disk and makes no network request. Its content security policy allows only its own scripts
and styles, by digest. All text of the run is embedded as data. The file contains no key, address or invite.
An open report is not updated.
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
BARS = 400  # number of newest submissions in the timeline of a report


def write_page(folder: Path, others: Sequence[Path], out: Path) -> None:
    """Write the report of the run in `folder`, with the curves of other runs. Raise UserError or OSError."""
    write_file(out, page(responses(FolderRun(folder), [FolderRun(other) for other in others])).encode())


def responses(run: FolderRun, others: Sequence[Run] = ()) -> dict[str, Any]:
    """Return the dashboard server's responses, by path."""
    dashboard = Dashboard(run, others)
    by_path = {path: compute({}) for path, compute in dashboard.routes().items()}
    status = dashboard.status()
    start_s = min((line["assigned_s"] for line in submissions(run.work())[-BARS:]), default=status.started_s)
    by_path["/api/timeline"] |= timeline(run, start_s, status.now_s) | {"started_s": start_s}
    return by_path


def page(data: dict[str, Any]) -> str:
    """Return the dashboard's HTML with its files and these responses embedded."""
    html = _read("dashboard.html")
    style = _read("theme.css") + _read("dashboard.css")
    theme, script = _read("theme.js"), bundle()
    picture = "data:image/svg+xml;base64," + base64.b64encode(_read("shoal.svg").encode()).decode()
    policy = (
        f"default-src 'none'; script-src {_digest(theme)} {_digest(script)}; style-src {_digest(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    html = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", html)
    html = html.replace(CHARSET, f'{CHARSET}\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    html = html.replace(
        '<script src="/assets/theme.js"></script>', f"<style>{style}</style>\n<script>{theme}</script>", 1
    )
    html = html.replace("/assets/shoal.svg", picture)
    return html.replace(
        f'<script type="module" src="/assets/{START}"></script>',
        f'<script type="application/json" id="responses">{embedded}</script>\n<script type="module">{script}</script>',
        1,
    )


def bundle() -> str:
    """Bundle all modules into one, each in its own function, because browsers do not load modules from disk."""
    modules: dict[str, str] = {}

    def add(name: str) -> None:
        source = _read(name)
        for _, other in IMPORT.findall(source):
            if other not in modules:
                add(other)
        names = ", ".join(name for _, name in EXPORT.findall(source))
        source = EXPORT.sub(r"\1", IMPORT.sub(_as_constant, source))
        modules[name] = f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {names} }};\n}})();'

    add(START)
    return "\n".join(["const modules = {};", *modules.values()])


def _as_constant(match: re.Match[str]) -> str:
    """Rewrite an import as a constant."""
    names, module = match.groups()
    return f'const {{{names.replace(" as ", ": ")}}} = modules["{module}"];'


def _read(name: str) -> str:
    """Read a static file of the page, or one shared by all pages."""
    path = STATIC / name
    return (path if path.is_file() else SHARED / name).read_text()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
