"""How fast a long run of many nodes opens in Chromium, and how much memory its page takes there.

    python benchmarks/dashboard_browser.py [--steps 5000] [--nodes 1000]

The run is the one of `benchmarks/dashboard.py`. Opened: from the navigation's start until all six charts are drawn. What
server and page computed for it, in seconds, depends less on what else the machine does. Memory: the page's JavaScript
heap after a collection, and what its process holds alone (private pages) beyond a blank page's.
Needs `make browser`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from dashboard import make
from machine import describe
from playwright.sync_api import sync_playwright

RESULT = Path(__file__).parent / "results" / "dashboard_browser.json"
TIMES = 3
VIEWS = ["timeline", "nodes", "validation", "overview"]
DRAWN = """() => document.querySelectorAll(".answer").length === 3 && document.querySelector(".cells i")
    && [...document.querySelectorAll(".card svg")].every((one) => one.querySelector("path, rect"))"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=1000)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.steps, arguments.nodes)
        found = [measure(Path(folder)) for _ in range(TIMES)]
    result = {
        "command": "python " + " ".join([f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        "machine": describe(),
        "load_average_before": load_before,
        "steps": arguments.steps,
        "nodes": arguments.nodes,
        "medians": {name: statistics.median(one[name] for one in found) for name in found[0]},
        "each": found,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(result["medians"])  # noqa: T201


def measure(folder: Path) -> dict[str, float]:
    """A new server and a new browser."""
    command = [sys.executable, "-m", "shoal", "dashboard", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split("dashboard: ")[1].split("/ ")[0]
        while not listens(url):
            time.sleep(0.1)
        with sync_playwright() as playwright:
            program = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            blank_mb = private_mb(browser)
            before_s = cpu_s(server.pid)
            found, page = opened(browser, url)  # the server has not read the run yet
            found = {f"first_{name}": value for name, value in found.items()}
            found["first_server_cpu_s"] = round(cpu_s(server.pid) - before_s, 2)
            page.close()
            again, page = opened(browser, url)
            found |= again | {"heap_mb": heap_mb(page)}
            found["process_beyond_blank_mb"] = round(private_mb(browser) - blank_mb, 1)
            for view in VIEWS:
                page.goto(f"{url}/#{view}")
                page.wait_for_selector("#view section")
                page.wait_for_timeout(1000)  # its answers
            found["heap_after_all_views_mb"] = heap_mb(page)
            found["process_beyond_blank_after_all_views_mb"] = round(private_mb(browser) - blank_mb, 1)
            browser.close()
    finally:
        server.terminate()
        server.wait()
    return found


def listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/assets/shoal.svg").status_code == 200
    except httpx.HTTPError:
        return False


def opened(browser: Any, url: str) -> tuple[dict[str, float], Any]:
    """Seconds until all is drawn, and of these those that the page computed; and the page."""
    page = browser.new_page(viewport={"width": 1440, "height": 900}, bypass_csp=True)  # of the waiting below
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(f"{url}/", wait_until="commit")
    page.wait_for_function(DRAWN, polling=20)
    took_s = round(page.evaluate("performance.now()") / 1000, 3)
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return {"open_s": took_s, "page_cpu_s": round(metrics["TaskDuration"], 2)}, page


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def heap_mb(page: Any) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return round(session.send("Runtime.getHeapUsage")["usedSize"] / 1e6, 1)


def private_mb(browser: Any) -> float:
    """Private memory of the renderers, of which there is one a page; of a blank page's where there is none."""
    page = None if browser.contexts else browser.new_page()
    session = browser.new_browser_cdp_session()
    infos = session.send("SystemInfo.getProcessInfo")["processInfo"]
    held = max(private_bytes(info["id"]) for info in infos if info["type"] == "renderer")
    if page:
        page.close()
    return held / 1e6


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


if __name__ == "__main__":
    main()
