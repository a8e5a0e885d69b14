"""What the record of ``bench scenarios`` says at its top, and what each of its numbers means."""

from collections.abc import Mapping
from typing import Any, Final

from tierkv.benchmarks.scenarios import LAYOUTS, Row

HOW: Final = {
    "held": "n conversations are held when the first n are prefilled, then each completes a turn, one after the other, without "
    "being refused, and the p90 time of a turn stays within twice that of the paged layout at its own capacity",
    "contiguous": "tokens and times of DynamicCache, whose bytes are counted as if the longest context was reserved for each",
    "paged": "tierkv with a device tier only; equal beginnings are shared in shared_prefix and nowhere else",
    "tiered": "the same device budget, with host memory and disk below, and equal beginnings shared; all conversations are opened "
    "before a round is measured, and where it breaks the bound, the most that keep it are looked for by halving",
    "prompts": "computed once by the stock cache; K and V of those that can share nothing are copied into a layout, the others "
    "are prefilled by generate; every conversation is cropped to its prompt after each round",
    "bytes": "between turns, of the conversations that are held: kv_bytes of their blocks with all copies, copy_bytes of the "
    "second, clean copies among them, which are given up when their room is wanted; engine_bytes what the engine had allocated, "
    "by its stats: pools with free slots in them, scratch, and files with their bookkeeping",
    "used_bytes": "tokens that are there times bytes a token; a block that several conversations share counts once",
    "waste_fraction": "1 - used_bytes / bytes of the blocks, each block once however many tiers have a copy; "
    "waste_fraction_with_copies takes all of kv_bytes",
    "round_seconds": "until every conversation has taken a turn: those that are held take it from their cache, the others compute "
    "their prompt again before it, for which the measured times of the stock cache are added; in shared_prefix that is more than "
    "paged would need, as only the own part of a prompt would have to be computed",
    "times": "layout after layout, the stock cache first: a machine that slows down or is busy meanwhile blurs what is compared",
    "p90": "of a round, interpolated between its turns; of one paged round, in the mixed load the median of three",
    "multi_turn": "figures at the last turn; by_turn at each; the text stands for the answers of the history",
    "dedup_saved_fraction": "bytes of blocks that sharing saved, of the bytes of all blocks without sharing, in the tiered layout "
    "while all of dedup_conversations were open; dedup_limit: tokens that are there again at the beginning of another prompt, of "
    "all tokens of the mix's prompts, so no sharing of beginnings can save more",
    "paging_saved_fraction": "1 - bytes of the blocks / bytes reserved, for the conversations that paged holds",
    "decode_fit": "least squares through the median seconds of one token at several contexts, all KV on the device; "
    "without_cache: one token when all K and V are computed again, with p of the n^p that fits best",
    "fragmentation": "A, B and C side by side with room behind; A ends, D comes. contiguous: a first-fit allocator; paged, "
    "tiered: an engine with a pool exactly as large, without and with memory below; runs: pieces in which D lies on the device",
}  # fmt: skip


def summary(
    scenarios: Mapping[str, Row],
    mixed: Row | None,
    decode: Row | None,
    fragmentation: Row | None,
) -> dict[str, Any]:
    """Return the record's top-level figures; those of a part that did not run are None.

    Args:
        scenarios: records by name, those that ran.
        mixed: record of the mixed load.
        decode: the line of decoded tokens, with ``without_cache``.
        fragmentation: what became of D.
    """
    found = mixed or {}
    return {
        "scenarios": dict(scenarios),
        "waste_fraction": found.get("waste_fraction"),
        "sessions_held": found.get("sessions_held"),
        "dedup_saved_fraction": found.get("dedup_saved_fraction"),
        "dedup_limit": found.get("dedup_limit"),
        "dedup_conversations": found.get("dedup_conversations"),
        "dedup_saved_fraction_by_scenario": {name: one["dedup_saved_fraction"] for name, one in scenarios.items()},
        "paging_saved_fraction": found.get("paging_saved_fraction"),
        "decode_fit": decode,
        "fragmentation": fragmentation,
        "mixed_load": mixed,
        "tokens_equal": all(tokens_equal(one) for one in (*scenarios.values(), *([mixed] if mixed else []))),
        "how": HOW,
    }


def tokens_equal(row: Row) -> bool:
    """Whether all answers of a record, at every turn, were the stock cache's."""
    moments = [row, *row.get("by_turn", {}).values()]
    return all(one[name]["tokens_equal"] for one in moments for name in LAYOUTS)


def intact(fragmentation: Row) -> bool:
    """Whether every sequence read back what was put into it."""
    found = [one[layout] for one in fragmentation["variants"].values() for layout in ("paged", "tiered")]
    return all(one.get("intact", True) for one in found)


def headlines(record: Mapping[str, Any]) -> list[str]:
    """Return what the figures of a record say, a sentence each."""
    said = []
    if record["mixed_load"]:
        held, waste = record["sessions_held"], record["waste_fraction"]
        said.append(
            f"Mixed load: {held['contiguous']} conversations in reservations, {held['paged']} in blocks, {held['tiered']} in tiers "
            f"on the same device budget; of what is allocated {_percent(waste['contiguous'])}, {_percent(waste['paged'])} and "
            f"{_percent(waste['tiered'])} hold no token."
        )
        said.append(
            f"Blocks take {_percent(record['paging_saved_fraction'])} less than reservations of the same conversations; sharing "
            f"saves another {_percent(record['dedup_saved_fraction'])} of the blocks, of at most {_percent(record['dedup_limit'])} "
            f"that this mix has in common."
        )
    if fit := record["decode_fit"]:
        again = fit["without_cache"]
        longest = max(fit["points"], key=lambda point: point["context"])
        said.append(
            f"With the cache a token takes {1e3 * fit['intercept']:.0f} ms and {1e6 * fit['slope']:.1f} ms more per 1,000 tokens "
            f"before it (r2 {fit['r2']:.3f}, up to {longest['context']:,}); computed again it grows as "
            f"n^{again['exponent']:.2f} and took {again['points'][-1]['seconds']:.2f} s at {again['points'][-1]['tokens']:,}."
        )
    if record["fragmentation"]:
        parts = []
        for one in record["fragmentation"]["variants"].values():
            yes = [name for name, placed in one["placed"].items() if placed]
            parts.append(
                f"{one['tokens']['D']:,} tokens with {one['free_tokens']:,} free, {one['largest_run_tokens']:,} in one piece: "
                f"placed by {' and '.join(yes) or 'none'}"
            )
        said.append("Fragmentation: " + "; ".join(parts) + ".")
    return said


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
