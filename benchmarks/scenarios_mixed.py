"""The load of ``bench sessions`` in three layouts: waste, sessions held, and what blocks and sharing save on it."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierkv.benchmarks.scenarios import LAYOUTS, Load, Row, Say, budgets_of, rows, run_layouts, saved_bytes
from tierkv.benchmarks.scenarios_mix import Plan, common_tokens
from tierkv.benchmarks.sessions import BOUND, PAGED_ROUNDS
from tierkv.benchmarks.sessions_mix import describe, make_mix
from tierkv.benchmarks.sessions_run import Advance
from tierkv.layout import BlockLayout


def mixed_load(plan: Plan, text: Sequence[int], per_token: int, folder: Path) -> Load:
    """Return the load: the mix, the reservation and the budgets that ``bench sessions`` has by default."""
    mix = make_mix(text, plan.mixed)
    tokens = sum(len(one.turn) + plan.mixed.answer for one in mix)
    budgets = budgets_of(plan.reserved_sessions, plan.mixed.context, tokens, per_token, folder)
    return Load(mix, plan.mixed.answer, plan.mixed.context, budgets, rounds=PAGED_ROUNDS)


def mixed_record(model: Any, plan: Plan, load: Load, layout: BlockLayout, advance: Advance, say: Say) -> Row:
    """Measure the load; return what a record says of it.

    Args:
        model: tierkv must not be attached to it.
        plan: whose mix it is.
        load: from ``mixed_load``.
        layout: of the model's KV.
        advance: as ``run_layouts``.
        say: likewise.

    Raises:
        CapacityError: the device does not hold a single conversation.
    """
    found, stock = run_layouts(model, load, advance, say)
    by_layout = rows(load, found, stock, layout)
    tiered = found["tiered"]
    opened = max((one.sessions for one in tiered.rounds), default=0)
    lengths = [len(one.prompt) for one in load.sessions]
    unshared = sum(layout.blocks_for(length) for length in lengths[:opened]) * layout.block_bytes
    paged, bound = by_layout["paged"], found["paged"].p90
    reserved = paged["sessions_held"] * load.reserved * layout.token_bytes
    return {
        **by_layout,
        "conversations": len(lengths),
        "mean_tokens": round(statistics.fmean(lengths), 1),
        "longest_tokens": max(lengths),
        "reserved_bytes_per_session": load.reserved * layout.token_bytes,
        "budget_bytes": {name: getattr(load.budgets, name) for name in ("device", "host", "disk")},
        "p90_bound_seconds": None if bound is None else round(BOUND * bound, 4),
        "waste_fraction": {name: by_layout[name]["waste_fraction"] for name in LAYOUTS},
        "sessions_held": {name: by_layout[name]["sessions_held"] for name in LAYOUTS},
        "dedup_saved_fraction": round(saved_bytes(tiered) / unshared, 4) if unshared else None,
        "dedup_conversations": opened,
        "dedup_limit": round(common_tokens(load.sessions) / sum(lengths), 4),
        "paging_saved_fraction": round(1 - sum(paged["kv_bytes"].values()) / reserved, 4),
        "mix": describe(plan.mixed, load.sessions),
    }
