"""Metrics for Prometheus, named like vLLM's."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from polydraft.engine import StopReason
from polydraft.serve.request import Progress, Request

if TYPE_CHECKING:
    from polydraft.serve.scheduler import Scheduler

_PREFIX = "polydraft:"
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """Counters and histograms of one server.

    The scheduler's thread calls `observe`; the event loop does the rest.

    Parameters
    ----------
    model : str
        The name that clients know. All metrics except those of the process have it as a label.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._shown = CollectorRegistry()
        self._shown.register(_Labelled(self.registry, {"model_name": model}))
        ProcessCollector(registry=self._shown)
        PlatformCollector(registry=self._shown)
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds with drafted tokens.")
        self.rests = self._counter("spec_decode_num_rests", "Rounds without drafted tokens.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Accepted tokens.")
        self.accepted_by_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their position in the draft.", "position"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens that were looked up in the cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens that were found there, and not read again.")
        self.new_tokens = self._counter("generation_tokens", "New tokens.")
        self.successes = self._counter("request_success", "Finished texts.", "finished_reason")
        self.failures = self._counter("request_failure", "Requests answered with an error.", "status")
        self.cancelled = self._counter("request_cancelled", "Requests whose clients left.")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self.between_tokens = self._histogram("inter_token_latency_seconds", "Per token after the first round.", _BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to a slot.", _FIRST)

    def watch(self, scheduler: "Scheduler") -> None:
        """Add gauges of a scheduler: texts that run and wait, and memory reserved and in use."""
        self._gauge("num_requests_running", "Texts in slots.", lambda: scheduler.running)
        self._gauge("num_requests_waiting", "Texts waiting for slots.", lambda: scheduler.waiting)
        self._gauge("cache_reserved_bytes", "Memory for the keys and values of all texts.", lambda: scheduler.cache_bytes)
        prefixes, pool = scheduler.prefixes, scheduler.pool
        cached = "Memory for cached beginnings of texts."
        self._gauge("prefix_cache_bytes", cached, lambda: 0 if prefixes is None else prefixes.nbytes)
        self._gauge("kv_cache_usage_perc", "Fraction of the reserved memory in use, 0 to 1.", lambda: scheduler.cache_usage)
        preempted = "Texts that gave up their memory for others, and were read again."
        self._gauge("num_preemptions", preempted, lambda: 0 if pool is None else pool.evictions)

    def observe(self, request: Request, progress: Progress) -> None:
        """Count an event of a request."""
        now, emitted = time.perf_counter(), progress.emitted
        if emitted.token_ids:
            self._observe_tokens(request, progress, now)
        elif emitted.stop_reason is StopReason.LENGTH:  # nothing but the prompt was asked for
            self.prompt_tokens.inc(len(request.sequences[progress.index].prompt))
        if emitted.stop_reason not in (None, StopReason.FAILED):
            self.successes.labels(finished_reason=emitted.stop_reason.value).inc()
            self.whole.observe(now - request.arrived)

    def _observe_tokens(self, request: Request, progress: Progress, now: float) -> None:
        emitted, index = progress.emitted, progress.index
        if index not in request.last_emitted:
            self.first_token.observe(now - request.arrived)
            self.queue_time.observe(request.admitted[index] - request.arrived)
            sequence = request.sequences[index]
            self.prompt_tokens.inc(len(sequence.prompt))
            if sequence.prompt_top_logprobs is None:
                self.prefix_queries.inc(len(sequence.prompt))
                self.prefix_hits.inc(sequence.cached)
        else:
            each = (now - request.last_emitted[index]) / len(emitted.token_ids)
            for _ in emitted.token_ids:
                self.between_tokens.observe(each)
        request.last_emitted[index] = now
        self.new_tokens.inc(len(emitted.token_ids))
        if not emitted.drafted:
            self.rests.inc()
        else:
            self.drafts.inc()
            self.draft_tokens.inc(emitted.drafted)
            self.accepted_tokens.inc(emitted.accepted)
            for position in range(emitted.accepted):
                self.accepted_by_position.labels(position=position).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._shown)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(_PREFIX + name, text, registry=self.registry).set_function(value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)


class _Labelled(Collector):
    """Add the same labels to all metrics of a registry."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample._replace(labels=self._labels | sample.labels) for sample in family.samples]
            yield family
