"""The metrics: how each number of ``Stats`` is called in Prometheus, what kind it is, and what it says.

Names follow Prometheus' conventions (base units, ``_total`` for counters) and, where serving engines have a metric for
the same thing, theirs: prefix cache *queries* and *hits* are counted in tokens, usage is a ratio from 0 to 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``labels`` are those besides the ones that every series has."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"tierkv_{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"tierkv_{name}", "gauge", text, labels)


TIERS: Final[Mapping[str, Metric]] = {
    "usage_ratio": _gauge("kv_cache_usage_ratio", "Share of a tier's budget that is taken, 0 to 1.", "tier"),
    "capacity_bytes": _gauge("tier_capacity_bytes", "Budget of a tier in bytes; 0 where it is off.", "tier"),
    "allocated_bytes": _gauge("tier_allocated_bytes", "Bytes taken from a tier now, bookkeeping included.", "tier"),
    "peak_bytes": _gauge("tier_peak_bytes", "Most bytes that were ever taken from a tier.", "tier"),
    "blocks": _gauge("tier_blocks", "Blocks whose highest copy lies in a tier.", "tier"),
    "copies": _gauge("tier_copies", "Further clean copies in a tier of blocks that also lie higher.", "tier"),
    "slots": _gauge("tier_slots", "Blocks that a tier could hold now.", "tier"),
}
"""By the name in ``TierStats``; the ratio is made of two of them."""

ENGINE: Final[Mapping[str, Metric]] = {
    "moved_bytes": _counter("bytes_moved", "Bytes moved from one tier to another.", "source", "destination"),
    "moved_seconds": _counter(
        "wire_busy_seconds", "Time in which copies between two tiers ran.", "source", "destination"
    ),
    "read_path": _gauge("read_path_info", "How attention reads the cache; always 1.", "read_path"),
    "kv_bytes_total": _gauge("kv_bytes", "Bytes of all live blocks, each counted once."),
    "caches": _gauge("caches", "Open caches."),
    "tiered_layers": _gauge("tiered_layers", "Layers of the model whose KV lies in the tiers."),
    "native_layers": _gauge("native_layers", "Layers of the model whose state is left to transformers."),
    "overlap": _gauge("overlap_ratio", "Share of the fetches' time hidden behind computing since the start, 0 to 1."),
}
"""By the name in ``Stats``."""

COUNTERS: Final[Mapping[str, Metric]] = {
    "forwards": _counter("forwards", "Committed forwards through tiered caches."),
    "torn_forwards": _counter("torn_forwards", "Forwards that were interrupted and rolled back."),
    "paged_forwards": _counter("paged_forwards", "Committed forwards whose attention read blocks where they lie."),
    "cpu_forwards": _counter("cpu_forwards", "Paged forwards in which the CPU attended to blocks in host memory."),
    "tokens": _counter("tokens", "Tokens appended to tiered caches, of prompts and answers, summed over rows."),
    "stall_seconds": _counter("stall_seconds", "Time that forwards waited for fetches of cold blocks."),
    "copy_seconds": _counter("copy_seconds", "Time that fetches of cold blocks took."),
    "room_waits": _counter("room_waits", "Times a forward waited for blocks to move down."),
    "tail_copies": _counter("tail_copies", "Private copies of last blocks (copy-on-write)."),
    "blocks_lost": _counter("blocks_lost", "Live blocks whose only copy could not be read back."),
    "recomputes": _counter("recomputes", "Calls of generate that ran again from their ids."),
    "write_failures": _counter("write_failures", "Writes that the disk tier refused."),
    "tokens_cropped": _counter("tokens_cropped", "Cached tokens dropped before a later call."),
}
"""By the name in ``Counters``."""

PREFIX: Final[Mapping[str, Metric]] = {
    "hits": _counter("prefix_cache_hits", "Prompt tokens found, in memory or in the store."),
    "prompt_tokens": _counter("prefix_cache_queries", "Prompt tokens looked up."),
    "matched_tokens": _counter("prefix_cache_matched_tokens", "Prompt tokens found, by where they lay.", "where"),
    "lookups": _counter("prefix_cache_lookups", "Prompts looked up."),
    "restored_tokens": _counter("prefix_cache_restored_tokens", "Tokens read from the store."),
    "restore_seconds": _counter("prefix_cache_restore_seconds", "Time that reading them took."),
    "used_tokens": _counter("prefix_cache_used_tokens", "Prompt tokens that no forward computed."),
    "computed_instead": _counter("prefix_cache_computed_instead_tokens", "Stored tokens computed, as that is faster."),
    "failed_restores": _counter("prefix_cache_failed_restores", "Rows of which a block could not be read."),
    "uncacheable_rows": _counter("prefix_cache_uncacheable_rows", "Rows whose KV their ids alone do not decide."),
    "shed_blocks": _counter("prefix_cache_shed_blocks", "Blocks that should have been written and were not."),
    "named_blocks": _gauge("prefix_cache_named_blocks", "Blocks in memory that prompts can be matched with."),
    "saved_bytes": _gauge("prefix_cache_saved_bytes", "Bytes of KV that sharing keeps from being there twice."),
    "kept_bytes": _gauge("prefix_cache_kept_bytes", "Bytes of blocks that no cache holds, kept for later prompts."),
    "waiting_blocks": _gauge("prefix_cache_waiting_blocks", "Blocks that wait for room in the store's queue."),
}
"""By the name in ``PrefixStats``; hits and matched tokens are made of two of them."""

STORE: Final[Mapping[str, Metric]] = {
    "blocks": _gauge("prefix_store_blocks", "Blocks in the store, of all namespaces and processes."),
    "payload_bytes": _gauge("prefix_store_payload_bytes", "Bytes of their KV."),
    "allocated_bytes": _gauge("prefix_store_allocated_bytes", "Bytes of the store's files."),
    "capacity_bytes": _gauge("prefix_store_capacity_bytes", "Bound of the bytes of the store's files."),
    "queued_bytes": _gauge("prefix_store_queued_bytes", "Bytes that wait to be written."),
    "failed": _gauge("prefix_store_failed", "1 while the store can not be written or read, else 0."),
    "hits": _counter("prefix_store_hits", "Keys that the store was asked for and had."),
    "misses": _counter("prefix_store_misses", "Keys that it had not, or could not read."),
    "puts": _counter("prefix_store_puts", "Blocks written."),
    "shed": _counter("prefix_store_shed", "Blocks refused, or dropped before they were written."),
    "evicted": _counter("prefix_store_evicted", "Blocks that went to make room."),
    "expired": _counter("prefix_store_expired", "Blocks that were too old."),
    "damaged": _counter("prefix_store_damaged", "Records that failed their checks and were taken out."),
    "collisions": _counter("prefix_store_collisions", "Whole records of other tokens than were asked for."),
    "write_failures": _counter("prefix_store_write_failures", "Blocks of batches that could not be committed."),
}
"""By the name in ``PrefixStoreStats``."""
