"""ModelPrefixes: which prefixes of a call may be looked up, and which of a cache may be kept, and under which namespace.

Ids alone do not always decide KV. A row counts only while they do: left padding and then tokens without a hole, the
usual positions, no embeddings, images or soft prompts, a model that keeps nothing besides growing KV. From the first
token where that ends, nothing of the row is looked up or kept, and it is counted.
"""

import functools
import hashlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.cache_utils import DynamicCache

from tierkv.errors import StoreError, TierKVError
from tierkv.integrations.hf_compat import effective_mask, is_dummy, text_config
from tierkv.integrations.hf_content import ForwardInputs
from tierkv.integrations.hf_weights import rotates_by_length
from tierkv.keys import namespace_digest
from tierkv.prefix_rows import KeyedRow, Prompt

if TYPE_CHECKING:
    from tierkv.integrations.hf_cache import TieredCache
    from tierkv.integrations.hf_call import GenerateCall
    from tierkv.integrations.hf_content import CacheContent
    from tierkv.integrations.hf_generate import ModelEngine

log = logging.getLogger(__name__)

_UNREADABLE: Final = "weights that cannot be read"
_ASKS_FOR_ALL: Final = ("output_hidden_states", "output_attentions")

FORMAT: Final = 1
"""Version of what is kept under a key; another one never finds it."""

NO_SAY: Final = frozenset(
    {
        "_name_or_path", "_attn_implementation", "_experts_implementation", "_commit_hash", "architectures", "attn_implementation",
        "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id",
        "finetuning_task", "id2label", "initializer_range", "label2id", "max_length", "output_attentions",
        "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id", "task_specific_params",
        "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Settings of a model's config that cannot change what its KV means, but for rounding. All others have a say."""


class ModelPrefixes:
    """The prefixes of one attached model."""

    def __init__(self, engine: "ModelEngine") -> None:
        """Begin with nothing known."""
        self._engine = engine
        self._never = ""
        tiered = {spec.model_index for spec in engine.layout.layers}
        layers = DynamicCache(config=text_config(engine.model)).layers
        if not all(is_dummy(layer) for index, layer in enumerate(layers) if index not in tiered):
            self._never = "a model with layers whose state is not in the blocks"
        if rotates_by_length(engine.model):
            self._never = "rotary embeddings that change with the length of a forward"
        # The last few sets of weights: adapters are switched to and fro.
        self._namespace_of = functools.lru_cache(maxsize=8)(self._make_namespace)

    # -- before generate runs -------------------------------------------------------------------------------------

    @staticmethod
    def expect_answer(call: "GenerateCall", cache: "TieredCache") -> None:
        """Tell a cache where the answer to a call will begin, and by which ids it will end."""
        ends = call.config.eos_token_id
        ids = [] if ends is None else torch.as_tensor(ends).reshape(-1).tolist()
        cache.content.end_ids = frozenset(ids)
        cache.content.answer_begins = call.prompt_tokens if call.mask is None else call.mask.shape[1]

    def begin(self, call: "GenerateCall", cache: "TieredCache", *, from_store: bool = True) -> None:
        """Let an empty cache begin with what is known of the call's prompts; without ``from_store``, what memory knows."""
        prefix = self._engine.prefix
        if not prefix.on:
            return
        reason = self._why_not(call)
        prompts = None if reason or call.ids is None else self._prompts(call, call.ids)
        stamp = self._engine.weights.stamp()
        namespace = None if prompts is None else self._namespace_of(stamp)
        if prompts is None or namespace is None:
            reason = reason or ("a mask with holes or padding on the right" if prompts is None else _UNREADABLE)
            prefix.refuse(call.batch, reason)
            return
        limit = call.prompt_tokens - 1
        try:
            keyed = prefix.reuse(cache.sequences, namespace, prompts, limit, from_store=from_store)
        except StoreError as error:
            log.warning("a prompt is computed that the prefix store may hold: %s", error)
            return
        if keyed and call.ids is not None:
            used = cache.sequences.length
            mask = effective_mask(call.config, call.ids, call.mask)
            cache.weights = stamp
            cache.begin_with(ForwardInputs(used, call.ids[:, :used], mask, implied_positions=True), keyed)
            if call.repeats > 1:
                cache.batch_repeat_interleave(call.repeats)

    def knows_more(self, call: "GenerateCall", cache: "TieredCache") -> bool:
        """Whether more is known of a call's prompts than what its cache, a filled one, has kept of them."""
        if not self._engine.prefix.on or call.ids is None or self._why_not(call):
            return False
        prompts = self._prompts(call, call.ids)
        if prompts is None:
            return False
        namespace = self._namespace_of(self._engine.weights.stamp())
        if namespace is None:
            return False
        known = min(self._engine.prefix.known_places(namespace, prompts), call.prompt_tokens - 1)
        return known >= cache.sequences.length + self._engine.layout.block_size

    def _why_not(self, call: "GenerateCall") -> str:
        model = self._engine.model
        if self._never:
            return self._never
        if call.ids is None or call.ids.dim() != 2:
            return "prompts that are not ids"
        if call.others or call.arguments.get("position_ids") is not None:
            return f"{', '.join(call.others) or 'position_ids'}, which have a say in the KV"
        if call.drafts or call.config.token_healing:
            return "drafted tokens or token healing, which feed the whole prompt again"
        if model.training:
            return "a model in training"
        if "prepare_inputs_for_generation" in vars(model):
            return "inputs that somebody else prepares (soft prompts, for one)"
        if call.arguments.get("custom_generate") is not None:
            return "a loop of the caller's own, which may feed the whole prompt again"
        if any(getattr(one, name, False) for one in (call.config, model.config) for name in _ASKS_FOR_ALL):
            return "hidden states or attentions of the whole prompt, which were asked for"
        return self._engine.weights.why_unknown()

    def _prompts(self, call: "GenerateCall", ids: torch.Tensor) -> list[Prompt] | None:
        """Return the rows, cut at their padding; None where a mask says anything but padding on the left."""
        mask = effective_mask(call.config, ids, call.mask)
        if mask is None:
            return [Prompt(row) for row in ids.tolist()]
        if mask.shape != ids.shape:
            return None
        pads = _left_padding(mask)
        return None if pads is None else [Prompt(row[pad:], pad) for row, pad in zip(ids.tolist(), pads, strict=True)]

    # -- after a forward ------------------------------------------------------------------------------------------

    @torch.compiler.disable  # called from inside a forward, which somebody may have compiled
    def publish(self, cache: "TieredCache", tokens: int, seconds: float) -> None:
        """Give keys to what has become full in a cache, and offer it to the store.

        Args:
            cache: after a forward that ended well.
            tokens: of each row that it computed.
            seconds: that it took.
        """
        prefix, content = self._engine.prefix, cache.content
        if not prefix.on or self._never or not content.length:
            return
        if (
            tokens >= self._engine.layout.block_size and self._engine.device.type == "cpu"
        ):  # elsewhere this is not the time
            prefix.rates.computed(tokens * cache.sequences.rows, seconds)
        content.keyed = content.keyed or _open_rows(content)
        if self._engine.model.training or not self._engine.weights.unchanged_since(cache.weights):
            for row in content.keyed:
                row.close(content.length - tokens)
        if not any(prefix.is_due(row, content.length) for row in content.keyed):
            prefix.drain()
            return
        namespace = self._namespace_of(cache.weights)
        if namespace is None or self._engine.weights.why_unknown() or self._engine.weights.stamp() != cache.weights:
            for row in content.keyed:
                row.close(row.pad + len(row.keys) * self._engine.layout.block_size)
        try:
            prefix.publish(cache.sequences, namespace or b"", content.keyed, self._ends(content), _ids_of(content))
        except StoreError as error:
            log.warning("prefixes are not kept any more: %s", error)
            for row in content.keyed:
                row.close(0)

    def _ends(self, content: "CacheContent") -> list[int]:
        """Return per row the place up to which its KV is a function of its ids; close the rows that end there."""
        known, size = content.known_length(), self._engine.layout.block_size
        assert content.ids is not None
        assert content.mask is not None
        ends = []
        for index, row in enumerate(content.keyed):
            begin = row.pad + len(row.keys) * size
            end = known if row.closed_at is None else min(known, row.closed_at)
            if end > begin:
                holes = (~content.mask[index, begin:end]).nonzero()
                end = begin + int(holes[0]) if holes.numel() else end
                if content.answer_begins is not None and content.end_ids:
                    first = max(begin, content.answer_begins)
                    later = content.ids[index, first:end].tolist()
                    answered = [at for at, one in enumerate(later) if one in content.end_ids]
                    end = first + answered[0] + 1 if answered else end
            if end < content.length:
                row.close(end)
            ends.append(end)
        return ends

    # -- namespaces -----------------------------------------------------------------------------------------------

    def prepare(self, stamp: bytes) -> None:
        """Work out the namespace of a stamp, outside of where an interrupt has to wait for it."""
        if self._engine.prefix.on and not self._never:
            self._namespace_of(stamp)

    def _make_namespace(self, stamp: bytes) -> bytes | None:
        """Return the digest of all that decides KV besides ids; where a store is, it gets the manifest too.

        None where the weights cannot be read, so that nobody knows what they are.
        """
        engine = self._engine
        store = engine.prefix.store
        if store is None:
            return hashlib.sha256(b"in this process" + stamp).digest()
        config, layout = text_config(engine.model), engine.layout
        try:
            fingerprint = engine.weights.fingerprint()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            log.warning("prefixes of this model cannot be kept: %s", error)
            return None
        parts: dict[str, Any] = {
            "format": FORMAT,
            "weights": fingerprint,
            "config": {name: value for name, value in config.to_dict().items() if name not in NO_SAY},
            "kv": {
                "dtype": layout.dtype,
                "block_size": layout.block_size,
                "layers": [[spec.model_index, spec.kv_heads, spec.key_dim, spec.value_dim] for spec in layout.layers],
            },
        }
        plain = _plain(parts)
        salt = engine.config.prefix.salt
        digest = namespace_digest({**plain, "salt": salt})
        manifest = {
            **plain,
            "salted": bool(salt),
            "model": str(getattr(engine.model.config, "_name_or_path", "") or ""),
            "class": type(engine.model).__name__,
            "computed_with": {
                "attention": str(getattr(config, "_attn_implementation", "")),
                "torch": torch.__version__,
                "device": engine.device.type,
            },
        }
        # Its own thread: the index may be locked by another process, or its disk not answer.
        threading.Thread(target=_register, args=(store, digest, manifest), daemon=True, name="tierkv-manifest").start()
        return digest


def _register(store: Any, digest: bytes, manifest: dict[str, Any]) -> None:
    try:
        store.namespace(digest, manifest)
    except TierKVError as error:  # closed meanwhile, or no index to write to: it is only for people to read
        log.debug("the manifest of a namespace was not written: %s", error)


def _plain(value: Any) -> Any:
    """Return what JSON can say of a config's value; objects are named by what they print."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def _left_padding(mask: torch.Tensor) -> list[int] | None:
    """Return the padding of each row, or None unless each is zeros and then ones, at least one."""
    ones = mask == 1
    if not bool((ones | (mask == 0)).all()):
        return None
    pads = (mask.shape[1] - ones.sum(dim=1)).tolist()
    places = torch.arange(mask.shape[1], device=mask.device)
    usual = places[None] >= torch.tensor(pads, device=mask.device)[:, None]
    return pads if bool((usual == ones).all()) and all(pad < mask.shape[1] for pad in pads) else None


def _open_rows(content: "CacheContent") -> list[KeyedRow]:
    """Return rows without keys, once the first token of each was seen; nothing before that."""
    assert content.mask is not None
    if not content.padded:
        return [KeyedRow() for _ in range(content.mask.shape[0])]
    if not bool(content.mask.any(dim=1).all()):
        return []
    return [KeyedRow(int(row.nonzero()[0])) for row in content.mask]


def _ids_of(content: "CacheContent") -> Any:
    def ids(row: int, begin: int, end: int) -> Sequence[int]:
        assert content.ids is not None
        return content.ids[row, begin:end].tolist()

    return ids
