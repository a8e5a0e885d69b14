"""GenerateCall: what one call of ``generate`` asks for, and how to make it safe on a cache that already holds tokens.

With stock transformers several calls on a filled cache silently give wrong tokens: the whole prompt already cached, a
cache longer than the prompt or of other content, assisted decoding or prompt lookup on a filled cache,
``use_cache=False`` with a cache, only the new ids without a mask. Each is made right here, or refused with a sentence.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tierkv.errors import UnsafeCall
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
    """One call of ``generate``.

    Attributes:
        arguments: all arguments by name; the cache is always under ``cache``.
        config: the effective generation config.
        ids: prompt ids ``[batch, tokens]``, or None where embeddings decide.
        mask: the padding mask as passed, 2-D, or None.
        cache: the tiered cache that the user passed, or None.
        foreign: another cache that the user passed, or None.
        batch: prompts.
        prompt_tokens: tokens of each prompt, as passed.
        repeats: rows per prompt (beams or returned sequences).
        longest: the most tokens a row can reach, cached ones included.
        drafts: whether candidates are drafted and verified.
        others: arguments besides the ids that have a say in the KV, images for example.
    """

    arguments: dict[str, Any]
    config: Any
    ids: torch.Tensor | None
    mask: torch.Tensor | None
    cache: TieredCache | None
    foreign: Any
    batch: int
    prompt_tokens: int
    repeats: int
    longest: int
    drafts: bool
    others: list[str]

    @classmethod
    def read(cls, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "GenerateCall":
        """Understand a call without running it.

        Raises:
            TypeError: the arguments do not fit the signature of ``generate``.
        """
        named = bound_arguments(args, kwargs)
        given = [named.pop(name, None) for name in CACHE_ARGUMENTS]
        chosen = next((cache for cache in given if cache is not None), None)
        config, model_kwargs = effective_generation_config(model, named)
        ids, embeds = named.get("input_ids"), named.get("inputs_embeds")
        ids = named.get("inputs") if ids is None else ids
        batch, tokens = (1, 1) if ids is None else (ids.shape[0], ids.shape[-1])
        if embeds is not None:
            ids = None
            batch, tokens = embeds.shape[:2]
        mask = named.get("attention_mask")
        if chosen is not None:
            named["cache"] = chosen
        return cls(
            arguments=named,
            config=config,
            ids=ids,
            mask=mask if mask is not None and mask.dim() == 2 else None,
            cache=chosen if isinstance(chosen, TieredCache) else None,
            foreign=None if isinstance(chosen, TieredCache) else chosen,
            batch=batch,
            prompt_tokens=tokens,
            repeats=max(config.num_beams or 1, config.num_return_sequences or 1),
            longest=max_length(model, config, named, tokens),
            drafts=drafts_tokens(config, named.get("assistant_model")),
            others=deciding_arguments(model_kwargs),
        )

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
        if self.config.use_cache is False:
            if self.cache is not None:
                raise UnsafeCall(
                    "use_cache=False with a cache appends the whole sequence at every token and gives wrong tokens; "
                    "drop use_cache=False, or do not pass the cache"
                )
            return "use_cache=False asks for no cache"
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
                "inputs_embeds (or no input at all) cannot be compared with what the cache holds; pass ids, or an empty cache"
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
