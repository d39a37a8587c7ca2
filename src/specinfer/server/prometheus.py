"""GET /metrics: the engine's counters in Prometheus' text, under our names and vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specinfer.engine.async_engine import AsyncEngine
from specinfer.metrics import Histogram

Labelled = Mapping[str, float]


class EngineCollector(Collector):
    """Reads the engine's counters when it is asked; nothing is kept twice."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Every metric, ours first."""
        m, now = self._engine.metrics, self._engine.gauges()
        depths = {str(depth): float(n) for depth, n in enumerate(m.accepted_per_depth)}
        phases = {name: now[f"{name}_seconds"] for name in ("draft", "target", "verify")}
        yield from self._gauge(
            "Requests that run.", now["num_running"], "requests_running", "num_requests_running"
        )
        yield from self._gauge(
            "Requests that wait.", now["num_waiting"], "requests_waiting", "num_requests_waiting"
        )
        yield from self._gauge(
            "Part of the K/V slots that running requests hold.", now["cache_usage"], "kv_cache_usage",
            "kv_cache_usage_perc",
        )  # fmt: skip
        yield from self._count(
            "Requests that ended, by reason.",
            m.finished,
            "requests_finished",
            "request_success",
            "finished_reason",
        )
        yield from self._count("Requests that were refused.", m.refused, "requests_refused", None, "reason")
        yield from self._count(
            "Requests that met their objective.", m.met, "objectives_met", None, "objective"
        )
        yield from self._count(
            "Requests that missed their objective.", m.missed, "objectives_missed", None, "objective"
        )
        for help_text, value, name, theirs in (
            ("Prompt tokens.", m.num_prompt_tokens, "prompt_tokens", "prompt_tokens"),
            ("Generated tokens.", m.num_output_tokens, "output_tokens", "generation_tokens"),
            ("Prompt tokens looked up in the prefix cache.", m.num_prompt_tokens, "prefix_cache_queries",
             "prefix_cache_queries"),
            ("Prompt tokens found there.", m.num_cached_tokens, "prefix_cache_hits", "prefix_cache_hits"),
            ("Requests that lost their slots to another.", now["num_preemptions"], "preemptions",
             "num_preemptions"),
            ("Trees verified.", m.num_drafts, "drafts", "spec_decode_num_drafts"),
            ("Tree nodes verified, roots excluded.", m.num_draft_tokens, "draft_tokens",
             "spec_decode_num_draft_tokens"),
            ("Draft tokens accepted.", m.num_accepted_tokens, "accepted_tokens",
             "spec_decode_num_accepted_tokens"),
            ("Engine steps.", now["num_steps"], "steps", None),
            ("Seconds in engine steps.", now["step_seconds"], "step_seconds", None),
            ("Steps that failed.", m.num_failed_steps, "failed_steps", None),
        ):  # fmt: skip
            yield from self._count(help_text, {"": value}, name, theirs)
        yield from self._count("Seconds in a step's phases.", phases, "phase_seconds", None, "phase")
        yield from self._count(
            "Paths accepted to this depth.", depths, "accepted_tokens_per_depth",
            "spec_decode_num_accepted_tokens_per_pos", "position",
        )  # fmt: skip
        for help_text, histogram, name, theirs in (
            ("Arrival to first token.", m.ttft, "time_to_first_token_seconds", "time_to_first_token_seconds"),
            ("Seconds per token after the first, per request.", m.tpot, "time_per_output_token_seconds",
             "request_time_per_output_token_seconds"),
            ("Seconds between emissions of a request.", m.itl, "inter_emission_seconds",
             "inter_token_latency_seconds"),
            ("Arrival to admission.", m.queue, "queue_seconds", "request_queue_time_seconds"),
            ("Arrival to end.", m.e2e, "request_seconds", "e2e_request_latency_seconds"),
            ("Tokens of a prompt.", m.prompt_lengths, "request_prompt_tokens", "request_prompt_tokens"),
            ("Tokens of an output.", m.output_lengths, "request_output_tokens", "request_generation_tokens"),
        ):  # fmt: skip
            yield from self._histogram(help_text, histogram, name, theirs)

    def _names(self, ours: str, theirs: str | None) -> Iterable[str]:
        return [f"specinfer:{ours}", *([f"vllm:{theirs}"] if theirs else [])]

    def _gauge(self, help_text: str, value: float, ours: str, theirs: str | None) -> Iterator[Metric]:
        for name in self._names(ours, theirs):
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def _count(
        self, help_text: str, values: Labelled, ours: str, theirs: str | None, label: str | None = None
    ) -> Iterator[Metric]:
        """One counter, or one per value of `label`."""
        for name in self._names(ours, theirs):
            counter = CounterMetricFamily(name, help_text, labels=["model_name", *([label] if label else [])])
            for key, value in dict(values).items():
                counter.add_metric([self._model_name, *([key] if label else [])], value)
            yield counter

    def _histogram(self, help_text: str, histogram: Histogram, ours: str, theirs: str) -> Iterator[Metric]:
        total, buckets = 0, []
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], list(histogram.counts), strict=True):
            total += count
            buckets.append((bound, float(total)))
        for name in self._names(ours, theirs):
            family = HistogramMetricFamily(name, help_text, labels=["model_name"])
            family.add_metric([self._model_name], buckets, histogram.sum)
            yield family


class Exposition:
    """The text of /metrics."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name))

    def text(self) -> bytes:
        """All metrics as they stand."""
        return generate_latest(self._registry)
