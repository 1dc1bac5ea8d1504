"""/metrics in Prometheus' text format: times to first token and between tokens, rows, waiting, tokens, refusals.

Invariant: no prompt, name or key is in it. Read by monitoring; called by `service`.
"""

import time
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shoal.serve.decoding.generation import Generation, Piece
from shoal.serve.decoding.scheduler import Scheduler
from shoal.serve.versions import Versions

FIRST_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
BETWEEN_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Timings:
    """What the scheduler observes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._first = Histogram(
            "shoal_serve_first_token_seconds", "from request to first token", registry=registry, buckets=FIRST_S
        )
        self._between = Histogram(
            "shoal_serve_token_seconds", "between two tokens of a row", registry=registry, buckets=BETWEEN_S
        )

    def observe(self, generation: Generation, piece: Piece) -> None:
        if piece.finish == "cancelled":
            return
        now_s = time.monotonic()
        if generation.last_s:
            self._between.observe(now_s - generation.last_s)
        else:
            self._first.observe(now_s - generation.asked_s)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.timings = Timings(self.registry)

    def watch(self, scheduler: Scheduler, versions: Versions) -> None:
        self.registry.register(_Gauges(scheduler, versions))

    async def respond(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": "text/plain; version=0.0.4"})


class _Gauges:
    def __init__(self, scheduler: Scheduler, versions: Versions) -> None:
        self.scheduler, self.versions = scheduler, versions

    def collect(self) -> Iterator[Metric]:
        counts, name = self.scheduler.counts, "shoal_serve_"
        newest = self.versions.newest
        yield GaugeMetricFamily(name + "rows", "completions being decoded", self.scheduler.live)
        yield GaugeMetricFamily(name + "waiting", "completions waiting for a row", self.scheduler.waiting)
        yield GaugeMetricFamily(name + "ready", "1 once a version is loaded", float(newest is not None))
        yield GaugeMetricFamily(
            name + "policy_version", "newest loaded version", (newest.offer.version or 0) if newest else -1
        )
        yield CounterMetricFamily(name + "completions", "completions that began", counts.started)
        yield CounterMetricFamily(name + "prompt_tokens", "prompt tokens prefilled", counts.prompt_tokens)
        yield CounterMetricFamily(name + "tokens", "tokens generated", counts.tokens)
        yield CounterMetricFamily(name + "steps", "decoding steps", counts.steps)
        yield CounterMetricFamily(name + "cancelled", "completions whose client left", counts.cancelled)
        yield CounterMetricFamily(name + "refused", "completions refused for lack of room", counts.refused)
