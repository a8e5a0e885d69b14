"""Stats: one frozen snapshot of an engine. Benchmarks, exporters and live views use these names and no others."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier at one moment. Bytes are what tierkv itself allocated, bookkeeping included."""

    capacity_bytes: int
    """The configured budget, resolved to bytes."""
    allocated_bytes: int
    """Bytes taken from the tier now: pools, scratch, staging and copies in flight (allocated file bytes on disk)."""
    peak_bytes: int
    """The most ``allocated_bytes`` has been; never above ``capacity_bytes``."""
    blocks: int
    """Blocks whose highest copy lies here; summed over the tiers each block counts once."""
    copies: int
    """Further clean copies here of blocks that also lie in a higher tier."""
    slots: int
    """Blocks the tier could hold now."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Events since the engine was made."""

    forwards: int = 0
    """Committed forwards through tiered caches."""
    torn_forwards: int = 0
    """Forwards that were interrupted and rolled back."""
    paged_forwards: int = 0
    """Committed forwards whose attention read blocks where they lie, or had nothing to read but its own tokens."""
    cpu_forwards: int = 0
    """Paged forwards in which the CPU attended to blocks in host memory, and the device to the others."""
    tokens: int = 0
    """Tokens appended to tiered caches, summed over rows."""
    stall_seconds: float = 0.0
    """Time that forwards stood still for fetches of cold blocks: the host's, and on CUDA the compute stream's, by events."""
    copy_seconds: float = 0.0
    """Time that those fetches took, each from its begin to its end."""
    room_waits: int = 0
    """Times a forward had to wait for blocks to move down before it could begin."""
    tail_copies: int = 0
    """Private copies of a last block that was shared, sealed or cold (copy-on-write)."""
    blocks_lost: int = 0
    """Live blocks whose only copy could not be read back."""
    recomputes: int = 0
    """Times the wrapped ``generate`` ran again from its ids: a block was lost, or the disk refused one."""
    write_failures: int = 0
    """Writes that the disk tier refused."""
    tokens_cropped: int = 0
    """Cached tokens dropped before a later call: its ids did not continue them, or it must compute them again."""


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Prefixes that were computed once and used again. Tokens are summed over rows, since the engine was made."""

    lookups: int = 0
    """Prompts that were looked up."""
    prompt_tokens: int = 0
    """Their tokens."""
    matched_tokens_memory: int = 0
    """Of these, tokens whose blocks were found in memory."""
    matched_tokens_disk: int = 0
    """Tokens beyond those that were found in the store."""
    restored_tokens: int = 0
    """Tokens that were read from the store."""
    restore_seconds: float = 0.0
    """Time that reading them took, from the first request to the last byte in place."""
    used_tokens: int = 0
    """Tokens that prompts began with and no forward computed. Rows of one batch share a length, so it may be less than was
    matched."""
    computed_instead: int = 0
    """Tokens in the store that were computed all the same, since that was measured to be faster."""
    failed_restores: int = 0
    """Rows of which a block could not be read; from there on they were computed."""
    uncacheable_rows: int = 0
    """Rows of calls whose KV is no function of their ids alone: looked up and kept is nothing of them."""
    uncacheable_reason: str = ""
    """Why, for the latest of them."""
    named_blocks: int = 0
    """Blocks in memory that prompts can be matched with."""
    saved_bytes: int = 0
    """Bytes of KV that would be in memory twice if rows and caches did not share blocks."""
    kept_bytes: int = 0
    """Bytes of blocks that no cache holds, kept until their room is wanted."""
    shed_blocks: int = 0
    """Blocks that should have been written to the store and were not: it was too slow, full, or had failed."""
    waiting_blocks: int = 0
    """Blocks that wait for room in the store's queue."""
    store: Any = None
    """``tierkv.storage.prefix_store.PrefixStoreStats``, or None where nothing is kept on disk."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What ``engine.stats()`` returns."""

    tiers: dict[str, TierStats]
    """Keys ``device``, ``host``, ``disk``."""
    moved_bytes: dict[str, int]
    """Bytes moved over each wire, for example ``device_to_host``; zero where a wire exists but was not used."""
    kv_bytes_total: int
    """Bytes of all live blocks, each counted once."""
    caches: int
    """Open caches of this engine."""
    read_path: str
    """How attention reads the cache: ``paged`` over the blocks, or ``gathered`` whole layers."""
    read_path_reason: str
    """Why that path was taken."""
    tiered_layers: int
    """Model layers whose KV lives in the tiers."""
    native_layers: int
    """Model layers left to transformers (recurrent, indexed, shared), whose bytes are not counted here."""
    overlap: float | None
    """Share of the fetches' time that was hidden behind computing, 1 - stall / copy; None where nothing was fetched."""
    note: str
    """One sentence on what the tiers did for this run, or why they gained nothing."""
    counters: Counters = field(default_factory=Counters)
    prefix: PrefixStats = field(default_factory=PrefixStats)
    moved_seconds: dict[str, float | None] = field(default_factory=dict)
    """Seconds in which each wire of ``moved_bytes`` was at work: at least one copy of it ran. What goes to the disk is over
    when the store has taken it, into its queue. On CUDA what a stream and what workers do for a wire is added up. None where
    nobody measures it."""

    cold_read: str = ""
    """How the paged path reads blocks in host memory, in one sentence: in place, by the CPU, streamed, or as measured costs
    say."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, ready for JSON."""
        return asdict(self)
