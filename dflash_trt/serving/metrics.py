"""Metrics for Prometheus: counts of the scheduler, looked up when they are asked for, and times of requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_trt.runtime.request import Request
from dflash_trt.serving.answer import Progress
from dflash_trt.serving.share_histogram import ShareHistogram
from dflash_trt.serving.snapshot import Snapshot

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass
class _Times:
    arrival: float
    last: float | None = None
    """When its last tokens came."""


class Metrics:
    """What one server counts.

    Args:
        model_name: the label of everything.
        positions: of all slots together, which cached tokens are a share of.
        prefixes: of names; each metric is given under all of them.
    """

    def __init__(self, model_name: str, positions: int, prefixes: Sequence[str]) -> None:
        self._model_name = model_name
        self._positions = positions
        self._prefixes = prefixes
        self._registry = CollectorRegistry()
        self._times: dict[Request, _Times] = {}
        label = {"labelnames": ["model_name"], "registry": self._registry}
        self._between = ShareHistogram(
            "inter_token_latency_seconds", "Between tokens; those of one pass share its time.", _SECONDS
        )
        self._first_token, self._whole = (
            Histogram(name, text, buckets=_SECONDS, **label).labels(model_name)  # type: ignore[arg-type]
            for name, text in (
                ("time_to_first_token_seconds", "From a request's arrival to its first token."),
                ("e2e_request_latency_seconds", "From a request's arrival to its end."),
            )
        )
        self._windows = Histogram(
            "verify_window_tokens",
            "Tokens that a pass verified for a request, at most.",
            buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
            **label,  # type: ignore[arg-type]
        ).labels(model_name)
        self._prompt_tokens, self._generation_tokens = (
            Counter(name, text, **label).labels(model_name)  # type: ignore[arg-type]
            for name, text in (("prompt_tokens", "Of requests begun."), ("generation_tokens", "Emitted."))
        )
        self._success = Counter(
            "request_success",
            "Requests ended, by why.",
            labelnames=["model_name", "finished_reason"],
            registry=self._registry,
        )

        self._ignored = Counter(
            "ignored_request_fields",
            "Requests with a field that nothing reads, by its path.",
            labelnames=["model_name", "field"],
            registry=self._registry,
        )

    def ignore(self, field: str) -> None:
        """A request had this field."""
        self._ignored.labels(self._model_name, field).inc()

    def arrive(self, requests: Iterable[Request]) -> None:
        """Requests were queued."""
        now = time.monotonic()
        for request in requests:
            self._times[request] = _Times(now)

    def progress(self, progress: Progress) -> None:
        """A step made this."""
        tokens: dict[Request, int] = {}
        for emission in progress.emissions:
            tokens[emission.request] = tokens.get(emission.request, 0) + 1
        decoded = 0
        for request, count in tokens.items():
            times = self._times[request]
            following = count
            if times.last is None:
                self._prompt_tokens.inc(request.prompt_length)
                self._first_token.observe(progress.at - times.arrival)
                times.last = progress.at
                following -= 1
            self._between.observe(progress.at - times.last, following)
            times.last = progress.at
            self._generation_tokens.inc(count)
            decoded += following
        if decoded:  # else the step only ended a prompt, which verified nothing
            self._windows.observe(progress.window)
        for request in progress.ended:
            self._whole.observe(progress.at - self._times.pop(request).arrival)
            self._success.labels(self._model_name, request.finish_reason).inc()

    def text(self, snapshot: Snapshot) -> bytes:
        """Everything, in Prometheus' text format."""
        metrics = [
            *self._registry.collect(),
            self._between.collect(self._model_name),
            *_scheduled(snapshot, self._model_name, self._positions),
        ]
        return generate_latest(_Renamed(metrics, self._prefixes))


@dataclass(frozen=True)
class _Renamed:
    """Metrics under each of some prefixes, as `generate_latest` reads a registry."""

    metrics: Sequence[Metric]
    prefixes: Sequence[str]

    def collect(self) -> Iterator[Metric]:
        for prefix in self.prefixes:
            for metric in self.metrics:
                renamed = Metric(prefix + metric.name, metric.documentation, metric.type)
                renamed.samples = [sample._replace(name=prefix + sample.name) for sample in metric.samples]
                yield renamed


def _scheduled(snapshot: Snapshot, model_name: str, positions: int) -> Iterator[Metric]:
    statistics = snapshot.statistics
    gauges = (
        ("num_requests_running", "Requests in slots.", snapshot.running),
        ("num_requests_waiting", "Requests that wait for a slot.", snapshot.waiting),
        ("verify_window", "Tokens that the last pass verified for a request, at most.", snapshot.window),
        ("kv_cache_usage_perc", "Share of the slots' positions in use, 0 to 1.", snapshot.cached_tokens / positions),
    )
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([model_name], value)
        yield gauge
    counters = (
        ("spec_decode_num_drafts", "Blocks drafted and verified.", statistics.drafts),
        ("spec_decode_num_draft_tokens", "Guesses verified.", statistics.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Guesses accepted.", statistics.accepted_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up.", snapshot.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens that were in the caches.", snapshot.prefix_hits),
    )
    for name, text, value in counters:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([model_name], value)
        yield counter
    by_place = CounterMetricFamily(
        "spec_decode_num_accepted_tokens_per_pos", "By place in the block.", labels=["model_name", "position"]
    )
    for place, count in enumerate(statistics.accepted_per_position):
        by_place.add_metric([model_name, str(place)], count)
    yield by_place
