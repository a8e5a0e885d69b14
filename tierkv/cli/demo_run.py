"""The runs of the demo: stock cache, tiers, after a restart, and logits side by side; each on the same prompt."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tierkv.benchmarks.restore_process import counted_tokens
from tierkv.cli.streams import TokenStream
from tierkv.config import CacheConfig

if TYPE_CHECKING:
    from tierkv.layout import BlockLayout
    from tierkv.metrics import Stats

BLOCK_SIZE: Final = 16
"""Tokens: so small that the queue of writes, a share of the small host tier, holds a block."""
DEVICE_PERCENT: Final = 23
HOST_PERCENT: Final = 25
"""Shares of the run's KV bytes that the upper tiers get; together under half, so that most of it lies on disk."""
LOGIT_STEPS: Final = 4
COMPARED_PROMPT_POSITIONS: Final = 16
NATURAL_END: Final = 48
"""An answer may end by itself only after so many tokens: a shorter one would compare too little."""


@dataclass
class Run:
    """One call of ``generate``.

    Attributes:
        stream: its tokens and when they came.
        prefilled_tokens: tokens of the prompt that the model computed.
        stats: where the cache lay at the end, for a tiered one.
    """

    stream: TokenStream
    prefilled_tokens: int = 0
    stats: "Stats | None" = None

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return self.stream.tokens


@dataclass(frozen=True)
class Restarted:
    """The same call in a second process, over the store that the first one wrote.

    Attributes:
        tokens: the new tokens.
        ttft_seconds: from the call to the first of them.
        prefilled_tokens: tokens of the prompt that the model computed.
    """

    tokens: list[int]
    ttft_seconds: float
    prefilled_tokens: int


@dataclass
class Outcome:
    """What the runs found.

    Attributes:
        dynamic: the stock cache.
        tiered: the same call with tierkv attached.
        restarted: the same again after a restart.
        logits_bit_identical: whether every compared logit was equal bit by bit.
        failures: what should hold and does not, one sentence each; empty for a good run.
    """

    dynamic: Run
    tiered: Run
    restarted: Restarted
    logits_bit_identical: bool
    failures: list[str] = field(default_factory=list)


def demo_config(layout: "BlockLayout", prompt_tokens: int, new_tokens: int, folder: str) -> CacheConfig:
    """Return a config whose device and host tiers hold less than half of the run's KV, and whose disk holds the rest.

    The prompt's KV is kept there too, for the second process. Nothing is taken from the user's settings; the demo's point
    is its budgets.
    """
    # A little less than what the run really reaches, should the answer end early.
    least_blocks = layout.blocks_for(prompt_tokens + min(new_tokens, NATURAL_END) - 1)
    kv_bytes = least_blocks * layout.block_bytes
    budgets = {
        "device.capacity": kv_bytes * DEVICE_PERCENT // 100,
        "host.capacity": kv_bytes * HOST_PERCENT // 100,
        # Half of it is for what is kept.
        "disk.capacity": 4 * layout.blocks_for(prompt_tokens + new_tokens) * layout.block_bytes + (128 << 20),
    }
    kept = {"disk.path": folder, "prefix.persist": True, "prefix.write_policy": "always"}
    return CacheConfig(block_size=layout.block_size).replace({**budgets, **kept})


def generate(
    model: Any, inputs: Mapping[str, Any], new_tokens: int, on_token: Callable[[int], None] | None, **cache: Any
) -> Run:
    """Generate greedily; note when each token came, and how much of the prompt was computed."""
    with counted_tokens(model) as counts:
        stream = TokenStream(on_token)
        model.generate(
            **inputs,
            **cache,
            do_sample=False, temperature=None, top_p=None, top_k=None, num_beams=1,
            min_new_tokens=min(new_tokens, NATURAL_END), max_new_tokens=new_tokens, streamer=stream,
        )  # fmt: skip
    # Of the new tokens all but the last are fed back, each in a forward of its own.
    return Run(stream, sum(counts) - (len(stream.tokens) - 1))


def same_logits(model: Any, ids: Any, new_cache: Callable[[], Any], steps: int, advance: Callable[[], None]) -> bool:
    """Run the whole prompt and a few tokens after it on the stock cache and on a tiered one; compare all logits.

    Of the prompt, the last positions are compared: every one of them attends to all tokens before.
    """
    import torch

    keep = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keep = {"logits_to_keep": COMPARED_PROMPT_POSITIONS}
    tiered_cache, stock_cache = new_cache(), None
    fed = ids
    equal = True
    with torch.no_grad():
        for _ in range(1 + steps):
            stock = model(input_ids=fed, cache=stock_cache, use_cache=True, **keep)
            advance()
            tiered = model(input_ids=fed, cache=tiered_cache, use_cache=True, **keep)
            advance()
            stock_cache = stock.cache
            equal = equal and torch.equal(stock.logits, tiered.logits)
            fed = stock.logits[:, -1:].argmax(-1)
    tiered_cache.close()
    return equal


def failures(outcome: Outcome) -> list[str]:
    """Return what should hold and does not."""
    stats = outcome.tiered.stats
    assert stats is not None
    found = []
    ours, theirs = outcome.tiered.tokens, outcome.dynamic.tokens
    if ours != theirs:
        pairs = zip(ours, theirs, strict=False)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
        found.append(f"the tokens differ from those of the stock cache from new token {first + 1} on")
    if not outcome.logits_bit_identical:
        found.append("the logits differ from those of the stock cache")
    again, computed = outcome.restarted, outcome.tiered.prefilled_tokens
    if again.tokens != ours:
        found.append("after the restart the tokens differ from those of the first process")
    if 2 * again.prefilled_tokens >= computed:
        found.append(
            f"after the restart {again.prefilled_tokens:,} of the prompt's tokens were computed, although the store should have "
            f"had most of the {computed:,}"
        )
    for name, tier in stats.tiers.items():
        if tier.peak_bytes > tier.capacity_bytes:
            found.append(f"the {name} tier took {tier.peak_bytes:,} bytes, above its budget of {tier.capacity_bytes:,}")
        if not tier.blocks:
            found.append(f"no block lies in the {name} tier at the end")
    upper, total = upper_bytes(stats), stats.kv_bytes_total
    if 2 * upper >= total:
        found.append(f"device and host hold {upper:,} bytes, not under half of the {total:,} bytes of KV")
    return found


def upper_bytes(stats: "Stats") -> int:
    """Return the budgets of device and host together."""
    return stats.tiers["device"].capacity_bytes + stats.tiers["host"].capacity_bytes
