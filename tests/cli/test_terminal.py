"""Text from other machines cannot move the terminal's cursor in output, errors, log lines or the live view."""

import io
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.text import Text

from shoal.cli.arguments import say
from shoal.cli.launch.process import log_lines
from shoal.errors import printable
from shoal.watch.terminal.live import Terminal

ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x7f\r"
CONTROLS = set(ATTACK) - set("]0;owned[2J31m")


class Hostile(BaseHTTPRequestHandler):
    """A server whose headers contain escape sequences, which the error quotes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "\x1b]0;owned\x07\x1b[2J\x9b31m")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_the_error_about_a_hostile_server_has_no_control_characters(listener: str) -> None:
    command = [sys.executable, "-m", "shoal", "pool", "discover", listener]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "is compressed" in done.stderr and "owned" in done.stderr
    assert not CONTROLS & set(done.stdout + done.stderr)


def test_commands_print_only_printable_characters_and_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"one {ATTACK}\n\ttwo")
    assert capsys.readouterr().out == "one ?]0;owned??[2J?31m???\n\ttwo\n"
    assert printable("é 中 🦈") == "é 中 🦈"


def test_a_console_prints_only_the_escapes_of_its_own_styles() -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=80, color_system="standard")
    console.print(Text(f"{ATTACK} name", style="red"))
    console.print(ATTACK, markup=False, highlight=False)
    printed = out.getvalue()
    assert printed.startswith("\x1b[31m") and "name" in printed
    assert printed.count("\x1b") == 2 and not (CONTROLS - {"\x1b"}) & set(printed)


def test_a_log_line_and_its_traceback_are_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    root, out = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(sys, "stderr", out)
    log_lines("worker")
    try:
        raise ValueError(ATTACK)
    except ValueError:
        logging.getLogger("shoal.test").exception("a node says %s", ATTACK)
    assert "worker: a node says" in out.getvalue() and "ValueError" in out.getvalue()
    assert not CONTROLS & set(out.getvalue())
