"""What three layouts come to on several kinds of conversations: one row for each kind of load that paging pays for.

    contiguous  every conversation reserves the longest context, as static allocation does; its tokens and times are those of
                ``DynamicCache``, whose bytes are counted as if they were reserved
    paged       tierkv with a device tier only; equal beginnings are shared where a scenario is about that
    tiered      the same device budget, with host memory and disk below, equal beginnings shared

*Held* is what it is in ``tierkv.benchmarks.sessions``. Conversations that are not held still want their turn: a round of all of
them costs the turns of those that are held, and for the others the prompt once more and the turn.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tierkv.benchmarks import sessions as measured
from tierkv.benchmarks.scenarios_mix import Plan, Scenario, common_tokens, moments
from tierkv.benchmarks.sessions_at_once import tiered_at_once
from tierkv.benchmarks.sessions_mix import Session
from tierkv.benchmarks.sessions_outcome import Outcome
from tierkv.benchmarks.sessions_run import Advance, Reference
from tierkv.errors import CapacityError
from tierkv.layout import BlockLayout

LAYOUTS: Final = ("contiguous", "paged", "tiered")
ROUNDS: Final = 1
"""Rounds of the paged layout in a scenario; it is compared with a bound of twice its time."""

Row = dict[str, Any]
Say = measured.Say


@dataclass(frozen=True)
class Load:
    """Conversations, and what they may take.

    Attributes:
        sessions: them.
        new_tokens: of every answer.
        reserved: tokens that the contiguous layout reserves for each.
        budgets: of the layouts.
        shares: whether the paged layout shares equal beginnings.
        rounds: of the paged layout.
    """

    sessions: Sequence[Session]
    new_tokens: int
    reserved: int
    budgets: measured.Budgets
    shares: bool = False
    rounds: int = ROUNDS

    @property
    def steps(self) -> int:
        """How often ``run_layouts`` calls ``advance``, if everything is held at the first try."""
        count = len(self.sessions)
        return count + (count + 1 + self.rounds * count) + (count + 1 + count)


def budgets_of(slots: int, reserved: int, longest_mix: int, per_token: int, folder: Path) -> measured.Budgets:
    """Return budgets of so many reservations on the device, half of that in host memory, and room for all on disk.

    Args:
        slots: reservations that the device takes.
        reserved: tokens of one.
        longest_mix: tokens of all conversations that are open together.
        per_token: bytes of a token.
        folder: of the disk tier.
    """
    device = slots * reserved * per_token
    # Files have pages and bookkeeping of their own.
    return measured.Budgets(device, device // 2, 2 * longest_mix * per_token + (64 << 20), folder)


def loads(plan: Plan, scenario: Scenario, text: Sequence[int], per_token: int, folder: Path) -> dict[int, Load]:
    """Return the loads of a scenario, by the turn at which its conversations are."""
    found = {}
    for turn, sessions in moments(text, scenario).items():
        tokens = sum(len(one.turn) + scenario.answer for one in sessions)
        budgets = budgets_of(plan.slots, plan.context, tokens, per_token, folder)
        found[turn] = Load(sessions, scenario.answer, plan.context, budgets, shares=bool(scenario.system))
    return found


def run_layouts(
    model: Any, load: Load, advance: Advance = lambda: None, say: Say = lambda _: None
) -> tuple[dict[str, Outcome], list[Reference]]:
    """Let the stock cache answer, then measure every layout; return what came of each.

    Args:
        model: tierkv must not be attached to it.
        load: what it is asked.
        advance: called after every conversation of the stock cache, every prefill and every turn.
        say: told the p90 of the tiered layout.

    Raises:
        CapacityError: the device does not hold a single conversation.
    """
    stock = measured.run_references(model, load.sessions, load.new_tokens, advance)
    budgets, reserved = load.budgets, load.reserved * measured.token_bytes(model)
    found = {"contiguous": measured.contiguous(budgets, reserved, stock)}
    found["paged"] = measured.on_device(
        model, budgets.config("shared" if load.shares else "paged"), load.sessions, stock, load.new_tokens,
        bound=None, rounds=load.rounds, advance=advance,
    )  # fmt: skip
    paged = found["paged"].p90
    if paged is None:
        raise CapacityError(f"the device does not hold the first conversation: {found['paged'].refused}")
    found["tiered"] = tiered_at_once(
        model, budgets.config("tiered"), load.sessions, stock, load.new_tokens,
        bound=measured.BOUND * paged, advance=advance, say=say,
    )  # fmt: skip
    return found, stock


def rows(load: Load, found: Mapping[str, Outcome], stock: Sequence[Reference], layout: BlockLayout) -> dict[str, Row]:
    """Return what a record says of each layout."""
    return {name: _row(name, load, outcome, stock, layout) for name, outcome in found.items()}


def scenario_record(
    model: Any, scenario: Scenario, by_turn: Mapping[int, Load], layout: BlockLayout, advance: Advance, say: Say
) -> Row:
    """Measure a scenario; return its record.

    Args:
        model: tierkv must not be attached to it.
        scenario: which.
        by_turn: its loads, from ``loads``; the figures are those of the last one.
        layout: of the model's KV.
        advance: as ``run_layouts``.
        say: likewise.

    Raises:
        CapacityError: the device does not hold a single conversation.
    """
    turns: dict[str, Row] = {}
    for turn, load in by_turn.items():
        found, stock = run_layouts(model, load, advance, say)
        lengths = [len(one.prompt) for one in load.sessions]
        unshared = sum(layout.blocks_for(length) for length in lengths) * layout.block_bytes
        turns[str(turn)] = {
            **rows(load, found, stock, layout),
            "conversations": len(lengths),
            "mean_tokens": round(statistics.fmean(lengths), 1),
            "longest_tokens": max(lengths),
            "reserved_bytes_per_session": load.reserved * layout.token_bytes,
            "budget_bytes": {name: getattr(load.budgets, name) for name in ("device", "host", "disk")},
            "prefill_seconds": round(sum(one.prefill_seconds for one in stock), 4),
            "dedup_saved_fraction": round(saved_bytes(found["tiered"]) / unshared, 4),
            "dedup_limit": round(common_tokens(load.sessions) / sum(lengths), 4),
        }
    last = turns[str(max(by_turn))]
    return {
        **last,
        **({"by_turn": turns} if scenario.turns else {}),
        "title": scenario.title,
        "mix": scenario.describe(),
        "shows": sentence(last, scenario),
        **({"by_turn_shows": _growth(turns)} if scenario.turns else {}),
    }


def saved_bytes(outcome: Outcome) -> int:
    """Return what sharing saved while the most conversations were open, held or not."""
    most = max(outcome.rounds, key=lambda one: one.sessions, default=None)
    return most.saved_bytes if most else 0


def sentence(row: Row, scenario: Scenario) -> str:
    """Return what a scenario's figures show, in one sentence."""
    count, held = row["conversations"], {name: row[name]["sessions_held"] for name in LAYOUTS}
    waste = row["contiguous"]["waste_fraction"]
    said = f"{held['contiguous']} of {count} conversations of {row['mean_tokens']:,.0f} tokens are held in reservations"
    said += f" ({waste:.0%} of it empty)" if waste is not None else ""
    said += f", {held['paged']} in blocks" + (" that are shared" if scenario.system else "")
    said += f", {held['tiered']} in tiers; one turn of all takes "
    seconds = [row[name]["round_seconds"] for name in LAYOUTS]
    said += ", ".join(f"{one:.0f}" if one >= 10 else f"{one:.1f}" for one in seconds) + " s"
    if scenario.system:
        said += f"; sharing saves {row['dedup_saved_fraction']:.0%} of the blocks"
    if held["paged"] == count:
        said += "; the device holds all, so tiers gain nothing"
    return said


def _growth(turns: Mapping[str, Row]) -> str:
    parts = (
        f"turn {turn}: {', '.join(str(row[name]['sessions_held']) for name in LAYOUTS)} of {row['conversations']}"
        for turn, row in turns.items()
    )
    return f"held by turn ({', '.join(LAYOUTS)}): " + "; ".join(parts)


def _row(name: str, load: Load, outcome: Outcome, stock: Sequence[Reference], layout: BlockLayout) -> Row:
    held = outcome.held
    rounds = [sum(one.turn_seconds) for one in outcome.rounds if one.held and one.sessions == held]
    others = sum(one.prefill_seconds + one.seconds for one in stock[held:])
    return {
        "sessions_held": held,
        "at_least": held == len(load.sessions),
        **_bytes(name, load, outcome, layout),
        "p90_turn_seconds": None if outcome.p90 is None else round(outcome.p90, 4),
        "round_seconds": round((statistics.median(rounds) if rounds else 0.0) + others, 4),
        "tokens_equal": not outcome.unequal,
        "refused": outcome.refused,
        "prompts_computed": outcome.computed,
        "rounds": [one.row() for one in outcome.rounds],
        "unequal_answers": [{"sessions": opened, "session": index} for opened, index in outcome.unequal],
    }


def _bytes(name: str, load: Load, outcome: Outcome, layout: BlockLayout) -> Row:
    """Return what the conversations that are held take between turns."""
    if name == "contiguous":
        used = sum(len(one.prompt) for one in load.sessions[: outcome.held]) * layout.token_bytes
        allocated = outcome.held * load.reserved * layout.token_bytes
        taken = {"device": allocated, "host": 0, "disk": 0}
        waste = 1 - used / allocated if allocated else None
        return _figures(taken, taken, dict.fromkeys(taken, 0), used, waste, saved=0)
    if (found := outcome.footprint) is None:
        nothing = {"device": 0, "host": 0, "disk": 0}
        return _figures(nothing, nothing, nothing, 0, None, saved=0)
    return _figures(
        found.kv_bytes, found.engine_bytes, found.copy_bytes, found.used_bytes, found.waste, found.saved_bytes
    )


def _figures(taken: Row, engine: Row, copies: Row, used: int, waste: float | None, saved: int) -> Row:
    return {
        "kv_bytes": dict(taken),
        "copy_bytes": dict(copies),
        "engine_bytes": dict(engine),
        "used_bytes": used,
        "waste_fraction": None if waste is None else round(waste, 4),
        "waste_fraction_with_copies": None if waste is None else round(1 - used / sum(taken.values()), 4),
        "saved_bytes": saved,
    }
