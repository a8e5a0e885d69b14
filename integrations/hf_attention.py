"""The attention function ``tierkv``: attention over blocks where they lie. The paged read path, as transformers sees it.

``TieredLayer.update`` leaves itself in the keyword arguments that transformers passes on to attention, and returns only the
new tokens; this function finds it there and attends through it. The model's config names this implementation only while
such a forward runs, so everything else that uses the model meets it as it was.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tierkv.errors import UnsafeCall
from tierkv.kernels import dispatch
from tierkv.layout import BlockLayout

if TYPE_CHECKING:
    from tierkv.integrations.hf_content import ForwardInputs

NAME: Final = "tierkv"
"""Must not contain "flash", "sdpa", "flex_attention", "paged|" or "/", which transformers takes for its own kinds (5.24)."""

HANDLE: Final = "tierkv_layer"
"""Keyword under which a layer of the cache reaches the attention function."""

FAMILIES: Final = frozenset(
    {
        "cohere", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2",
        "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Model types whose attention hands on what ``update`` returned, unchanged, and its keyword arguments (5.24)."""

UNKNOWN: Final = ("position_bias", "indices", "block_indices")
"""Arguments that change what attention computes and that there is no kernel for (5.24)."""


def why_gathered(model: PreTrainedModel, config: Any, layout: BlockLayout, *, computes_on_cpu: bool = False) -> str:
    """Return why attention of a model cannot read blocks where they lie; empty where it can.

    Args:
        model: that shall be attached.
        config: of its decoder.
        layout: of its tiered layers.
        computes_on_cpu: whether the CPU attends to blocks in host memory, whatever the model runs on.
    """
    devices = {model.device, torch.device("cpu")} if computes_on_cpu else {model.device}
    name = getattr(config, "model_type", "")
    if name not in FAMILIES:
        return f"{name or type(model).__name__} is not one of the families whose attention can read blocks"
    heads = getattr(config, "num_attention_heads", 0)
    for group in layout.groups:
        if not heads or heads % group.kv_heads:
            return f"{heads} query heads do not divide among {group.kv_heads} KV heads"
        dtype = getattr(torch, layout.dtype)
        for device in devices:
            reason = dispatch.unsupported(device, dtype, group.key_dim, group.value_dim, heads // group.kv_heads)
            if reason:
                return reason
    # The implementation is named by the config that attention looks at, which must be the one that is changed.
    if any(hasattr(m, "layer_idx") and getattr(m, "config", config) is not config for m in model.modules()):
        return "its attention layers have configs of their own"
    return ""


def first_seen(inputs: "ForwardInputs") -> Sequence[int] | None:
    """Return per row the first token that is not padding, or None where the mask is more than left padding.

    Args:
        inputs: of the forward; its mask covers cached and new tokens. An empty result means no padding in any row.
    """
    if not inputs.usual_mask or not inputs.ids_decide:
        return None
    if inputs.mask is None:
        return ()
    mask = inputs.mask.bool()
    if bool(mask.all()):
        return ()
    seen = mask.sum(dim=1)
    first = mask.long().argmax(dim=1).where(seen > 0, mask.shape[1])
    if not bool((seen == mask.shape[1] - first).all()):
        return None
    return [int(position) for position in first.tolist()]


class AttentionSwitch:
    """Lets a model's attention go through ``attention`` between ``on`` and ``off``, by the name in its config."""

    def __init__(self, config: Any) -> None:
        """Make a switch for the config that the attention layers look at."""
        self._config = config
        self._before: str | None = None

    def on(self) -> None:
        """Name this implementation."""
        # Not the public setter, which changes sub-configs (those of vision towers) too (5.24).
        self._before = self._config._attn_implementation_internal  # noqa: SLF001
        self._config._attn_implementation_internal = NAME  # noqa: SLF001

    def off(self) -> None:
        """Put back what was there. Does nothing unless it is on."""
        if self._config._attn_implementation_internal == NAME:  # noqa: SLF001
            self._config._attn_implementation_internal = self._before  # noqa: SLF001


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001 - the layer of the cache was given them
    value: torch.Tensor,  # noqa: ARG001
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - what may be seen follows from positions and padding
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to all tokens of a cached layer; called by the model.

    Args:
        module: the attention layer.
        query: ``[rows, query_heads, tokens, key_dim]``.
        key: the new tokens' keys.
        value: the new tokens' values.
        attention_mask: not used.
        scaling: factor of the scores; by default that of the module.
        dropout: must be 0.
        softcap: limit of the scores, or None.
        s_aux: attention sinks ``[query_heads]``, or None.
        kwargs: the layer of the cache, and what other implementations may want.

    Returns:
        ``[rows, tokens, query_heads, value_dim]`` and None in place of the weights.

    Raises:
        UnsafeCall: another than an attached model's forward got here, or the model asks for what is not built.
    """
    layer = kwargs.get(HANDLE)
    if layer is None:
        raise UnsafeCall(
            "attention was called while another thread's forward ran over a tiered cache of the same model; call the model itself"
        )
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None] + ["dropout"] * bool(dropout)
    if unknown:
        raise UnsafeCall(f'attention with {" and ".join(unknown)} cannot read blocks; set attention.path = "gathered"')
    scale = scaling if scaling is not None else getattr(module, "scaling", query.shape[-1] ** -0.5)
    return layer.attend(query, scale=scale, softcap=softcap, sinks=s_aux), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Stand in for the mask function: building a mask of queries by tokens would cost more than attention itself."""


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
