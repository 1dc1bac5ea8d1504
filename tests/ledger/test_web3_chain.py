"""Whatever a chain's node answers, the caller gets a LedgerError."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import pytest

from shoal.ledger.chain import LedgerError
from shoal.ledger.evm import ChainLostError, EvmStakes, Web3Chain

pytestmark = pytest.mark.skipif(find_spec("web3") is None, reason="web3.py is not installed: pip install 'shoal[evm]'")
KEY = "ab" * 32
CONTRACT = "0x" + "11" * 20
CALLS: dict[str, Callable[[EvmStakes], object]] = {
    "account": lambda stakes: stakes.account(KEY),
    "deposited": lambda stakes: stakes.deposited(KEY, CONTRACT),
    "is_paid": lambda stakes: stakes.is_paid("w-1"),
    "is_slashed": lambda stakes: stakes.is_slashed("w-1"),
    "operator": lambda stakes: stakes.operator(),
    "events": lambda stakes: list(stakes.events()),
    "send": lambda stakes: stakes.credit(KEY, "w-1", 5),
}


class Node(ThreadingHTTPServer):
    """A chain's node. It answers with `answer` (a body or a JSON-RPC result), unless it is asked for the chain's id."""

    answer: Any = b""


class Answering(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Node)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = "0x1" if request["method"] == "eth_chainId" else self.server.answer
        if not isinstance(answer, bytes):
            answer = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="no body"),
        pytest.param(b"<html>busy</html>", id="html"),
        pytest.param(b"\xff\xfe", id="not text"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[" * 100_000, id="nested"),
        pytest.param("0x", id="empty result"),
        pytest.param("0xzz", id="not hex"),
        pytest.param("0x" + "ff" * 31, id="too short"),
        pytest.param([{"data": "0x"}], id="empty event"),
        pytest.param({"data": 5}, id="an object"),
        pytest.param(7, id="a number"),
    ],
)
def test_any_invalid_answer_is_a_ledger_error(node: Node, answer: Any, call: str) -> None:
    node.answer = answer
    stakes = EvmStakes(Web3Chain(f"http://127.0.0.1:{node.server_port}"), CONTRACT)
    with pytest.raises(LedgerError):
        CALLS[call](stakes)


@pytest.mark.parametrize("data", ["0x", "0x" + "ff" * 192, "0x" + "00" * 31 + "20" + "ff" * 32])
def test_an_answer_from_another_contract_raises_a_chain_lost_error(node: Node, data: str) -> None:
    node.answer = data
    stakes = EvmStakes(Web3Chain(f"http://127.0.0.1:{node.server_port}"), CONTRACT)
    with pytest.raises(ChainLostError, match="is not from a contract of Shoal"):
        stakes.account(KEY)


def test_opening_a_chain_keeps_the_recursion_limit(node: Node) -> None:
    """A dependency of web3.py sets it to 100,000, too much for C's stack. Only a new process imports web3 once more."""
    code = (
        "import sys; from shoal.ledger.evm import Web3Chain; before = sys.getrecursionlimit();"
        f"Web3Chain('http://127.0.0.1:{node.server_port}'); assert sys.getrecursionlimit() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
