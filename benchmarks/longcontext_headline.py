"""What a long-context run came to, in a few sentences: the first thing that its page and its table say."""

from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.benchmarks.longcontext_rows import Row
from tierkv.benchmarks.longcontext_settings import LOSSY, REFERENCE, is_tiered
from tierkv.benchmarks.longcontext_summary import cells, mismatches, reused, spread_of
from tierkv.charts_units import format_tokens, format_value


def headline(result: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return what the run came to, in two to four sentences made from its rows."""
    said = []
    wrong = mismatches(rows, must_match=result["must_match"])
    compared = [row for row in rows if row["exact"] and row["agreement"] is not None]
    if wrong:
        said.append(f"{len(wrong)} of {len(compared)} answers of exact caches are not {REFERENCE}'s.")
    elif compared and result["must_match"]:
        said.append(f"Every exact cache gave {REFERENCE}'s tokens in all {len(compared)} answers compared.")
    elif compared:
        mean = sum(row["agreement"] for row in compared) / len(compared)
        said.append(f"In {result['dtype']} exact caches agree with {REFERENCE} on {mean:.1%} of tokens.")
    if lossy := [row for row in rows if row["cache"] == LOSSY and row["agreement"] is not None]:
        mean = sum(row["agreement"] for row in lossy) / len(lossy)
        said.append(f"The lossy {LOSSY} cache agrees on {mean:.1%}.")
    said += [*_against(rows), *_with_prefixes(rows)]
    if errors := sum(row["error"] is not None for row in rows):
        said.append("1 row is an error." if errors == 1 else f"{errors} rows are errors.")
    if result["missing"]:
        said.append(f"The run is not finished: {result['missing']} rows are missing.")
    return said


def _against(rows: Sequence[Row]) -> list[str]:
    """Compare tierkv with the reference at the longest length that both have."""
    found = {(cell["cache"], cell["length"]): cell for cell in cells(rows)}
    for length in sorted({length for _, length in found}, reverse=True):
        own = next((cell for (cache, at), cell in found.items() if at == length and is_tiered(cache)), None)
        reference = found.get((REFERENCE, length))
        if own is None or reference is None or not (own["ttft_seconds"] and reference["ttft_seconds"]):
            continue
        said = []
        kept, whole = own["kv_in_memory_bytes"], reference["kv_in_memory_bytes"]
        if kept and whole:
            said.append(
                f"At {format_tokens(length)} tokens {own['cache']} held {format_value(kept.median, 'bytes')} in memory where "
                f"{REFERENCE} held {format_value(whole.median, 'bytes')} of KV."
            )
        speeds = own["tokens_per_second"], reference["tokens_per_second"]
        if all(speeds):
            said.append(
                f"It made {speeds[0].median:.1f} tokens a second ({REFERENCE}: {speeds[1].median:.1f}) and its first token "
                f"took {format_value(own['ttft_seconds'].median, 'seconds')} "
                f"({format_value(reference['ttft_seconds'].median, 'seconds')})."
            )
        return said
    return []


def _with_prefixes(rows: Sequence[Row]) -> list[str]:
    """Say how soon the first token came where a prefix was known, at the longest length at which one was."""
    known = reused(rows)
    if not known:
        return []
    length = max(row["length"] for row in known)
    some = [row for row in known if row["length"] == length]
    names = {(row["task"], row["sample"]) for row in some}
    others = [
        row for row in rows
        if row["cache"] == REFERENCE and row["length"] == length and (row["task"], row["sample"]) in names
    ]  # fmt: skip
    own, reference = (spread_of(row["ttft_seconds"] for row in of) for of in (some, others))
    if own is None or reference is None:
        return []
    sentence = (
        f"Where conversations share a system prompt, the later ones' first token took {format_value(own.median, 'seconds')} with "
        f"tierkv and {format_value(reference.median, 'seconds')} with {REFERENCE}."
    )
    return [sentence]
