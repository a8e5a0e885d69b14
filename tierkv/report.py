"""How an engine's state becomes ``Stats``."""

from typing import TYPE_CHECKING

from tierkv.metrics import Counters, Stats, TierStats
from tierkv.tier import Tier, Wire

if TYPE_CHECKING:
    from tierkv.engine import Engine


def make_stats(engine: "Engine", counters: Counters, caches: int) -> Stats:
    """Return a snapshot of ``engine``."""
    census = engine.manager.census()
    slots = {tier: pool.num_slots for tier, pool in engine.manager.pools.items()}
    capacities = {Tier.DEVICE: engine.budgets.device, Tier.HOST: engine.budgets.host, Tier.DISK: engine.budgets.disk}
    tiers = {
        tier.label: TierStats(
            capacities[tier], engine.usage.now(tier), engine.usage.peak(tier), *census[tier], slots[tier]
        )
        for tier in Tier
    }
    kept = engine.manager.shared.num_unused
    live = sum(blocks for blocks, _ in census.values()) - kept
    return Stats(
        tiers=tiers,
        moved_bytes={wire.label: engine.moved.get(wire, 0) for wire in _wires(engine)},
        kv_bytes_total=live * engine.layout.block_bytes,
        caches=caches,
        read_path="paged"
        if counters.paged_forwards or not (engine.gathered_because or counters.forwards)
        else "gathered",
        read_path_reason=_read_path_reason(engine, counters),
        cold_read=_cold_read(engine),
        tiered_layers=len(engine.layout.layers),
        native_layers=engine.native_layers,
        overlap=_overlap(counters),
        note=_note(engine, counters, live, {tier: blocks for tier, (blocks, _) in census.items()}),
        counters=counters,
        prefix=engine.prefix.stats(),
        moved_seconds=_moved_seconds(engine),
    )


def _read_path_reason(engine: "Engine", counters: Counters) -> str:
    if engine.gathered_because:
        return engine.gathered_because
    gathered = counters.forwards - counters.paged_forwards
    if gathered:
        return (
            f"{gathered:,} of {counters.forwards:,} forwards gathered layers: a mask with holes, inputs besides ids, attention "
            f"weights that were asked for, or training"
        )
    return "attention of this model reads blocks where they lie"


def _cold_read(engine: "Engine") -> str:
    if engine.stores.host is None:
        return "there is no host tier"
    if engine.gathered_because:
        return "layers are gathered whole"
    return engine.cold_reads.describe()


def _overlap(counters: Counters) -> float | None:
    if not counters.copy_seconds:
        return None
    return max(0.0, 1 - counters.stall_seconds / counters.copy_seconds)


def _moved_seconds(engine: "Engine") -> dict[str, float | None]:
    clock = engine.transfers.clock
    found = None if clock is None else clock.seconds()
    return {wire.label: None if found is None else found.get(wire, 0.0) for wire in _wires(engine)}


def _wires(engine: "Engine") -> list[Wire]:
    on = [tier for tier in Tier if tier is Tier.DEVICE or engine.manager.pools[tier].num_slots]
    return [Wire(source, destination) for source in on for destination in on if source is not destination]


def _note(engine: "Engine", counters: Counters, live: int, blocks: dict[Tier, int]) -> str:
    if engine.manager.pools[Tier.DISK].frozen:
        return "the disk tier failed and takes nothing more; what it holds is still read"
    if counters.forwards == 0:
        return "no forward has run through a tiered cache yet"
    if live == 0:
        return "no cache is open; the counters cover what ran"
    below = live - blocks[Tier.DEVICE]
    if below == 0:
        return "every block fits on the device, so the tiers below gained nothing; they would with longer contexts"
    saved = below * engine.layout.block_bytes
    return f"{below} of {live} blocks lie below the device and free {saved:,} bytes of it"
