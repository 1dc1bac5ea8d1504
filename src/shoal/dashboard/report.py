"""A whole run as one HTML file: the answers, curves, contributions, verdicts, samples, config, and the audit's result.

Invariant: it opens from disk and asks nothing of any network; it holds no script, and its policy allows none; every text of
the run is escaped; no key, address or invite is in it. The same charts are written as PNGs. Called by `shoal report`.
Left out: what is only live (queue, broadcast), and whole rollouts (`shoal dashboard` shows them).
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal import config as config_module
from shoal.dashboard.charts import charts
from shoal.dashboard.drawing import svg
from shoal.dashboard.nodes import node_table
from shoal.dashboard.overview import overview
from shoal.dashboard.pictures import draw
from shoal.dashboard.queries import Queries
from shoal.dashboard.validation import validation
from shoal.dashboard.watched import WatchedFolder
from shoal.dashboard.words import said
from shoal.evidence import ALPHA
from shoal.files import write_file
from shoal.protocol.history import RunHistory
from shoal.watch.figures import clean, count, duration, memory, number, percent
from shoal.watch.pace import Pace
from shoal.watch.summary import read_summary

STYLE = (Path(__file__).parent / "static" / "report.css").read_text()
MOST_SAMPLES = 12
MOST_WORKERS = 200
AUDIT = "audit.txt"
HIDDEN = ("database", "endpoint", "url", "host", "token")  # keys of the config that name places


def write_report(run: WatchedFolder, out: Path) -> tuple[int, list[Path]]:
    """Writes the file, and its charts into a folder of the same name. Returns the file's bytes and the pictures.

    Raises OSError.
    """
    page = render(run).encode()
    write_file(out, page)
    assert run.queries is not None and run.config is not None
    folder = out.with_suffix("")
    folder.mkdir(exist_ok=True)
    drawn = charts(run.history, run.queries, run.config.coordinator.async_level)
    return len(page), [draw(chart, folder / f"{chart.name}.png") for chart in drawn]


def render(run: WatchedFolder) -> str:
    status = run.look()
    assert run.queries is not None and run.config is not None and run.folder is not None
    found = overview(
        status,
        run.history,
        config=run.config,
        queries=run.queries,
        running=run.running(),
        wall_s=run.wall_s(status),
    )
    rows = node_table(status, Pace(), run.queries, state=found["state"], alpha=ALPHA, public=True)
    summary = read_summary(run.folder)
    drawn = charts(run.history, run.queries, run.config.coordinator.async_level)
    parts = [
        _head(found, summary),
        _answers(found["answers"]),
        f'<section class="charts">{"".join(map(svg, drawn))}</section>',
        _section("Contributions", _contributions(rows, found)),
        _section("Rejected work", _verdicts(run.queries)),
        _section("What the model wrote", _samples(run.history)),
        _section("Audit", _audit(run.folder)),
        _section("Configuration", f"<pre>{escape(_config(run))}</pre>"),
    ]
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(found['name'])} · Shoal</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(parts)
        + f"<footer>Written by <code>shoal report</code> on {time.strftime('%Y-%m-%d %H:%M')}."
        " Every figure is in the run's folder.</footer></main></body></html>\n"
    )


def _head(found: dict[str, Any], summary: dict[str, Any]) -> str:
    facts = {
        "steps": f"{found['trained']} of {found['steps']}",
        "took": duration(found["elapsed_s"]),
        "tokens generated": count(found["tokens"]),
        "tokens trained": count(found["tokens_trained"]),
        "learner busy": percent(found["busy"], 0),
        "exact tokens": count(found["exact"]["tokens"]),
        "memory, all processes": memory(int(summary.get("peak_together_bytes") or 0)),
    }
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts.items())
    model = escape(found.get("model", ""))
    loss = f"{escape(found.get('loss', ''))} on {escape(', '.join(found.get('sources', [])))}"
    title = f'<header><h1>{escape(found["name"])}</h1><p class="soft">{model}, {loss}; {found["state"]}</p></header>'
    return f'{title}<div class="facts">{cells}</div>'


def _answers(answers: Sequence[dict[str, str]]) -> str:
    cards = "".join(
        f'<section class="answer {one["tone"]}"><h2>{escape(one["question"])}</h2><strong>{escape(one["answer"])}</strong>'
        f"<p>{escape(one['detail'])}</p></section>"
        for one in answers
    )
    return f'<div class="answers">{cards}</div>'


def _contributions(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    workers = sorted((row for row in rows if row["role"] == "worker"), key=lambda row: -row["credited"])
    if not workers:
        return '<p class="soft">No worker took part.</p>'
    credited = sum(row["credited"] for row in workers) or 1
    body = [
        [
            row["name"],
            row["condition"],
            count(row["accepted"]),
            count(row["rejected"]),
            count(row["missed"]),
            count(row["credited"]),
            percent(row["credited"] / credited),
            number(row["evidence"], 1),
        ]
        for row in workers[:MOST_WORKERS]
    ]
    heads = ["worker", "state", "accepted", "rejected", "missed", "credited tokens", "share", "evidence against, nats"]
    more = len(workers) - MOST_WORKERS
    return _table(heads, body, text=2) + (f'<p class="soft">and {more} more workers</p>' if more > 0 else "")


def _verdicts(queries: Queries) -> str:
    rejected = validation(queries)["rejected"]
    if not rejected:
        return '<p class="soft">Nothing was rejected.</p>'
    return "".join(
        f'<div class="reason"><b class="{"bad" if row["hard"] else "warn"}">{escape(row["reason"])}</b>'
        f"<span>{escape(row['worker'])}, step {row['step'] + 1}: {escape(row['words'])}"
        f'<br><small class="soft">{escape(row["detail"])}</small></span></div>'
        for row in rejected
    )


def _samples(history: RunHistory) -> str:
    samples = history.samples
    if not samples:
        return '<p class="soft">No sample was recorded.</p>'
    every = max(len(samples) // MOST_SAMPLES, 1)
    return "".join(
        f"<article><header>version {one.policy_version} · reward {number(one.reward, 2)} · {one.tokens} tokens</header>"
        f'<pre class="soft">{escape(one.prompt)}</pre><pre>{escape(one.completion)}</pre></article>'
        for one in samples[::-1][::every][:MOST_SAMPLES]
    )


def _audit(folder: Path) -> str:
    path = folder / AUDIT
    if not path.is_file():
        return (
            '<p class="soft">This run was not audited yet. <code>shoal audit FOLDER &gt; FOLDER/audit.txt</code> checks its'
            " ledger, files and steps again; then write this report once more.</p>"
        )
    return f"<pre>{escape(said_lines(path.read_text(errors='replace')[:20_000]))}</pre>"


def said_lines(text: str) -> str:
    return "\n".join(said(line) for line in text.splitlines())


def _config(run: WatchedFolder) -> str:
    assert run.config is not None
    lines = config_module.dumps(run.config).splitlines()
    return "\n".join(clean(line) for line in lines if line.split(" = ")[0].strip() not in HIDDEN)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text: int) -> str:
    """The first `text` columns hold words, the others figures."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{'' if i < text else ' class=n'}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'
