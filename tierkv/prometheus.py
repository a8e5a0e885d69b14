"""Metrics for Prometheus: the numbers of ``engine.stats()``, named after the field's conventions.

Needs the extra ``metrics``; importing this loads nothing of it. Nothing is counted here: every scrape asks the engines,
so that counters are the engine's own and vanish with it. Labels of every series: ``model_name``, ``pid`` and ``engine``,
a number that no other engine of the process has.

A ratio over the last minutes is for the query to make, for example of prompt tokens that were found:

    rate(tierkv_prefix_cache_hits_total[5m]) / rate(tierkv_prefix_cache_queries_total[5m])
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from tierkv.errors import ClosedError, ConfigError
from tierkv.prometheus_names import COUNTERS, ENGINE, PREFIX, STORE, TIERS, Metric
from tierkv.watch import EngineSnapshot, ProcessSnapshot, look_around

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from tierkv.publish import Published

Source = Callable[[], Iterable[tuple[int, EngineSnapshot]]]
"""Returns engines as they are now, each with the number of its process."""

_LABELS: Final = ("model_name", "pid", "engine")


def serve(
    engines: "Published | Sequence[Published] | None" = None, port: int = 9400, host: str = "127.0.0.1"
) -> "MetricsServer":
    """Serve metrics at ``http://host:port/metrics`` from a thread of this process, until the result is closed.

    Args:
        engines: one engine or several of this process, or None for all engines of this user in any process, as
            ``tierkv top`` sees them. A closed one is left out from then on.
        port: 0 for any that is free.
        host: address to listen at. Others than this machine's own let anybody who reaches it read the names of models.

    Raises:
        ConfigError: the library of the extra ``metrics`` is not installed.
        OSError: the port cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError:
        raise ConfigError(
            'metrics need prometheus-client; install the extra with pip install "tierkv-cache[metrics]"'
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(_source(engines)))
    server, thread = start_http_server(port, host, registry)
    return MetricsServer(server, thread, host)


class MetricsServer:
    """A running endpoint. Use as a context manager, or call ``close``.

    Attributes:
        url: what Prometheus is to scrape.
    """

    def __init__(self, server: Any, thread: Any, host: str) -> None:
        """Take over what ``prometheus_client.start_http_server`` returned."""
        self._server, self._thread = server, thread
        self.port: int = server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class EngineCollector:
    """What a ``prometheus_client`` registry asks at every scrape."""

    def __init__(self, source: Source) -> None:
        """Report the engines that ``source`` returns."""
        self._source = source

    def collect(self) -> "Iterator[Family]":
        """Yield all metrics, each with the samples of all engines."""
        families: dict[str, Any] = {}
        for pid, engine in self._source():
            labels = {"model_name": engine.name, "pid": str(pid), "engine": str(engine.id)}
            for metric, more, value in _samples(engine):
                if metric.name not in families:
                    families[metric.name] = _family(metric)
                families[metric.name].add_metric([*(labels[name] for name in _LABELS), *more], value)
        yield from families.values()


def _source(engines: "Published | Sequence[Published] | None") -> Source:
    if engines is None:
        return lambda: _flat(look_around().processes)
    chosen = list(engines) if isinstance(engines, Sequence) else [engines]

    def ask() -> Iterator[tuple[int, EngineSnapshot]]:
        for number, engine in enumerate(chosen, start=1):
            try:
                stats = engine.stats()
            except ClosedError:
                continue
            name = getattr(engine, "name", "") or type(engine).__name__
            yield os.getpid(), EngineSnapshot(number, name, stats)

    return ask


def _flat(processes: Iterable[ProcessSnapshot]) -> Iterator[tuple[int, EngineSnapshot]]:
    return ((process.pid, engine) for process in processes for engine in process.engines)


def _family(metric: Metric) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=[*_LABELS, *metric.labels])


def _samples(engine: EngineSnapshot) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    """Yield metric, values of its own labels, and value."""
    stats = engine.stats
    if stats is None:
        return
    for name, tier in stats.tiers.items():
        if tier.capacity_bytes:
            yield TIERS["usage_ratio"], (name,), tier.allocated_bytes / tier.capacity_bytes
        for attribute, metric in TIERS.items():
            if hasattr(tier, attribute):
                yield metric, (name,), getattr(tier, attribute)
    for wire, moved in stats.moved_bytes.items():
        source, _, destination = wire.partition("_to_")
        yield ENGINE["moved_bytes"], (source, destination), moved
        if (seconds := stats.moved_seconds.get(wire)) is not None:
            yield ENGINE["moved_seconds"], (source, destination), seconds
    yield ENGINE["read_path"], (stats.read_path,), 1
    for attribute in ("kv_bytes_total", "caches", "tiered_layers", "native_layers", "overlap"):
        if (value := getattr(stats, attribute)) is not None:
            yield ENGINE[attribute], (), value
    for attribute, metric in COUNTERS.items():
        yield metric, (), getattr(stats.counters, attribute)
    prefix = stats.prefix
    for attribute, metric in PREFIX.items():
        if hasattr(prefix, attribute):
            yield metric, (), getattr(prefix, attribute)
    memory, disk = prefix.matched_tokens_memory, prefix.matched_tokens_disk
    yield PREFIX["hits"], (), memory + disk
    yield PREFIX["matched_tokens"], ("memory",), memory
    yield PREFIX["matched_tokens"], ("disk",), disk
    yield from _store_samples(prefix.store)


def _store_samples(store: Any) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    """Yield those of the prefix store, which is an object here and a plain dict where it came through a socket."""
    if store is None:
        return
    for attribute, metric in STORE.items():
        value = store.get(attribute) if isinstance(store, dict) else getattr(store, attribute)
        if attribute == "failed":
            yield metric, (), float(value is not None)
        elif isinstance(value, int | float):
            yield metric, (), value
