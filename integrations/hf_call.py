"""GenerateCall: what one call of ``generate`` asks for, and how to make it safe on a cache that already holds tokens.

With stock transformers several calls on a filled cache silently give wrong tokens: the whole prompt already cached, a
cache longer than the prompt or of other content, assisted decoding or prompt lookup on a filled cache,
``use_cache=False`` with a cache, only the new ids without a mask. Each is made right here, or refused with a sentence.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from tierkv.errors import UnsafeCall
from tierkv.integrations.hf_arguments import check_caches, check_prompt, check_settings
from tierkv.integrations.hf_cache import TieredCache
from tierkv.integrations.hf_compat import (
    CACHE_ARGUMENTS,
    CROSS_ATTENTION,
    bound_arguments,
    deciding_arguments,
    drafts_tokens,
    effective_generation_config,
    effective_mask,
    looks_at_ids,
    max_length,
)
from tierkv.integrations.hf_content import positions_are_usual

log = logging.getLogger(__name__)


@dataclass
class GenerateCall:
    """One call of ``generate``. ``read`` finds out whose it is, and ``measure``, where it is tierkv's, the rest.

    Attributes:
        arguments: all arguments by name; the cache is always under ``cache``.
        config: the effective generation config.
        cache: the tiered cache that the user passed, or None.
        foreign: another cache that the user passed, or None.
        ids: prompt ids ``[batch, tokens]``, or None where embeddings decide.
        mask: the padding mask ``[batch, tokens or more]``, or None.
        batch: prompts.
        prompt_tokens: tokens of each prompt, as passed.
        repeats: rows per prompt (beams or returned sequences).
        longest: the most tokens a row can reach, cached ones included.
        drafts: whether candidates are drafted and verified.
        others: arguments besides the ids that have a say in the KV, images for example.
    """

    arguments: dict[str, Any]
    config: Any
    cache: TieredCache | None
    foreign: Any
    ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    batch: int = 1
    prompt_tokens: int = 1
    repeats: int = 1
    longest: int = 1
    drafts: bool = False
    others: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "GenerateCall":
        """Find out whose call this is, without running it.

        Raises:
            TypeError: the arguments do not fit the signature of ``generate``.
            UnsafeCall: a setting or a cache is of a type or value that no call can mean.
        """
        named = bound_arguments(args, kwargs)
        given = {name: value for name in CACHE_ARGUMENTS if (value := named.pop(name, None)) is not None}
        chosen = check_caches(given)
        check_settings(named)
        config, model_kwargs = effective_generation_config(model, named)
        if chosen is not None:
            named["cache"] = chosen
        tiered = isinstance(chosen, TieredCache)
        return cls(
            arguments=named,
            config=config,
            cache=chosen if tiered else None,
            foreign=None if tiered else chosen,
            others=deciding_arguments(model_kwargs),
        )

    def measure(self, model: PreTrainedModel) -> None:
        """Find out how many rows of how many tokens the call is about.

        Raises:
            UnsafeCall: ids, embeddings, mask or positions are not what the model takes.
        """
        named, config = self.arguments, self.config
        check_prompt(model, named)
        ids, embeds = named.get("input_ids"), named.get("inputs_embeds")
        ids = named.get("inputs") if ids is None else ids
        if embeds is not None:
            self.batch, self.prompt_tokens = embeds.shape[:2]
        elif ids is not None:
            self.ids = ids
            self.batch, self.prompt_tokens = ids.shape[:2]
        mask = named.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            if ids is None and embeds is None:
                self.batch = mask.shape[0]  # transformers makes so many prompts of one token
            self.mask = mask.expand(self.batch, -1) if mask.shape[0] == 1 else mask
        self.repeats = max(config.num_beams or 1, config.num_return_sequences or 1)
        self.longest = max_length(model, config, named, self.prompt_tokens)
        self.drafts = drafts_tokens(config, named.get("assistant_model"))

    @property
    def rows(self) -> int:
        """Rows of the cache while the call runs."""
        return self.batch * self.repeats

    @property
    def returns_cache(self) -> bool:
        """Whether the result carries the cache to the user."""
        return bool(self.config.return_dict_in_generate)

    def use(self, cache: TieredCache) -> None:
        """Run the call on ``cache``."""
        self.arguments["cache"] = cache

    def not_ours(self) -> str:
        """Return why tierkv must leave this call alone; empty when it need not.

        Raises:
            UnsafeCall: a tiered cache was passed to a call that would corrupt or ignore it.
        """
        if not self.config.use_cache:  # None and 0 too: only at the value True are single tokens fed (5.24)
            if self.cache is not None:
                raise UnsafeCall(
                    f"use_cache={self.config.use_cache!r} with a cache appends the whole sequence at every token and gives "
                    f"wrong tokens; drop use_cache, or do not pass the cache"
                )
            return f"use_cache={self.config.use_cache!r} asks for no cache"
        if self.config.assistant_early_exit is not None:
            if self.cache is not None:
                raise UnsafeCall(
                    "assistant_early_exit runs only the first layers over the cache, which a tiered cache cannot follow; "
                    "use an assistant model or prompt_lookup_num_tokens instead"
                )
            return "assistant_early_exit runs only the first layers over the cache"
        if any(self.arguments.get(name) is not None for name in CROSS_ATTENTION):
            if self.cache is not None:
                raise UnsafeCall("a tiered cache has no room for cross-attention; do not pass it with encoder states")
            return "it attends to encoder states"
        if self.foreign is not None:
            return f"a cache of type {type(self.foreign).__name__} was passed, and it wins"
        if self.config.cache_implementation is not None and self.cache is None:
            return f"cache_implementation={self.config.cache_implementation!r} was set, and it wins"
        if isinstance(self.arguments.get("custom_generate"), str):
            if self.cache is not None:
                raise UnsafeCall(
                    "custom_generate runs code from elsewhere, which may not know what a filled cache needs"
                )
            return "custom_generate runs code from elsewhere"
        return ""

    def make_safe(self, cache: TieredCache) -> Callable[[], None]:
        """Find out how to bring a filled cache and this call together so that the tokens are those of a fresh run.

        Keeps the longest prefix that the ids share with the cache, at least one token short of the prompt; repeats rows
        for beams; starts over where drafting could not.

        Returns:
            What changes the cache. Nothing is changed before, so that a call that is refused leaves it as it was.

        Raises:
            UnsafeCall: the call cannot be made right; the message says how to make it.
            TornForward: an interrupted forward left layers that cannot be rolled back.
        """
        cache.check_usable()
        held = cache.sequences.length
        if held == 0:
            return cache.reset
        if self.ids is None or self.ids.dim() != 2:
            raise UnsafeCall(
                "inputs_embeds (or no 2-D ids at all) cannot be compared with what the cache holds; pass ids, or an empty cache"
            )
        if self.mask is not None and not bool(((self.mask == 0) | (self.mask == 1)).all()):
            raise UnsafeCall(
                "the attention mask holds other values than 0 and 1, which would place the cached tokens elsewhere; pass 0 for "
                "padding and 1 for tokens"
            )
        rows = cache.sequences.rows
        if rows not in (self.batch, self.rows):
            raise UnsafeCall(
                f"the cache holds {rows} rows and the call has {self.batch} prompts with {self.repeats} rows each; use "
                f"cache.batch_select_indices to choose the rows that the prompts continue, or cache.reset()"
            )
        keep = held
        if self.mask is not None and self.mask.shape[1] != self.ids.shape[1]:
            self._continue(cache, self.mask)
        else:
            keep = self._shared_prefix(cache, self.ids)

        def change() -> None:
            if keep < held:
                cache.engine.count(tokens_cropped=held - keep)
                if keep and cache.can_crop(keep - held):
                    cache.crop(keep - held)
                else:
                    cache.reset()
            if cache.sequences.rows == self.batch and self.repeats > 1:
                cache.batch_repeat_interleave(self.repeats)

        return change

    def _continue(self, cache: TieredCache, mask: torch.Tensor) -> None:
        """Only new ids are passed, with a mask over all tokens."""
        held, new = cache.sequences.length, self.prompt_tokens
        if mask.shape[1] != held + new:
            raise UnsafeCall(
                f"the attention mask covers {mask.shape[1]} tokens; it must cover the ids ({new}) or, where only new ids are "
                f"passed, the {held} cached tokens and the ids ({held + new})"
            )
        if self.drafts:
            raise UnsafeCall("assisted decoding on a filled cache needs the full ids, cached tokens included")
        if looks_back := looks_at_ids(self.config, self.arguments):
            raise UnsafeCall(f"{' and '.join(looks_back)} must see the cached tokens too; pass the full ids")
        if not cache.content.continues:
            raise UnsafeCall(
                "this cache was filled with positions or masks of the caller's own, so new ids would get other positions "
                "than they continue; call cache.reset() and pass the full ids"
            )
        if not cache.content.same_padding(self._for_rows_of(cache, mask)):
            raise UnsafeCall("the attention mask says another padding than the cached tokens were computed with")
        self.longest += held

    def _shared_prefix(self, cache: TieredCache, ids: torch.Tensor) -> int:
        """The full ids are passed: return how many cached tokens can be kept."""
        held, count = cache.sequences.length, ids.shape[1]
        mask = effective_mask(self.config, ids, self.mask)
        positions = self.arguments.get("position_ids")
        if positions is not None:
            usual = positions_are_usual(positions, None if mask is None else mask.bool(), 0, count)
            if usual is None or not bool(usual.all()):
                self.others.append("position_ids")
        shared = cache.content.common_prefix(
            self._for_rows_of(cache, ids), None if mask is None else self._for_rows_of(cache, mask)
        )
        if shared == 0 and not self.others:
            raise UnsafeCall(
                f"the cache holds {held} tokens and the ids do not continue them; pass the full ids (cached tokens "
                f"included), or the new ids with a mask over all tokens, or call cache.reset() for a new text"
            )
        # At least one token must be computed. Drafting feeds the whole prompt again, whatever the cache holds, and token
        # healing changes ids at the end of the prompt (5.24).
        keep = 0 if self.drafts or self.others or self.config.token_healing else min(shared, count - 1)
        if keep == held:
            return held
        if self.others:
            log.warning(
                "%s may change what the %d cached tokens were; all are computed again", " and ".join(self.others), held
            )
        elif shared < min(held, count):
            log.warning(
                "the ids continue only %d of the %d cached tokens; the rest is dropped and computed again", shared, held
            )
        return keep

    def _for_rows_of(self, cache: TieredCache, per_prompt: torch.Tensor) -> torch.Tensor:
        """Repeat what is said per prompt for every row of a cache that was filled by beams."""
        return per_prompt.repeat_interleave(cache.sequences.rows // self.batch, dim=0)
