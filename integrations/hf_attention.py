"""The attention function ``tierkv``: attention over blocks where they lie. The paged read path, as transformers sees it.

``TieredLayer.update`` leaves itself in the keyword arguments that transformers passes on to attention, and returns only the
new tokens; this function finds it there and attends through it. The model's config names this implementation only while
such a forward runs, so everything else that uses the model meets it as it was.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakValueDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tierkv.errors import UnsafeCall
from tierkv.interrupts import deferred_interrupt
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

STOCK: Final = ("sdpa", "eager")
"""Implementations that compute plain attention. Another one, of the user's own perhaps, may compute anything."""

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
    if reason := why_not_now(config):
        return reason
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


def why_not_now(config: Any) -> str:
    """Return why the next forward of a model cannot read blocks, by its config as it is now; empty where it can.

    Args:
        config: of its decoder.
    """
    implementation = AttentionSwitch.of(config).implementation
    if implementation not in STOCK:
        return f"attention is {implementation!r}, and only {' and '.join(STOCK)} are known to be plain attention"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        return "its tokens see later ones too"
    return ""


def first_seen(inputs: "ForwardInputs", cached: int) -> Sequence[int] | None:
    """Return per row the first token that is not padding, or None where the mask is more than left padding.

    Args:
        inputs: of the forward; its mask covers cached and new tokens.
        cached: tokens that the cache holds. While there are none, attention is computed by the model itself.

    Returns:
        Positions; empty where no row has padding.
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
    if not bool((seen == mask.shape[1] - first).all()) or (cached and not bool(seen.all())):
        return None  # what a row sees that sees nothing is up to the implementation
    return [int(position) for position in first.tolist()]


class AttentionSwitch:
    """Lets a model's attention go through ``attention`` between ``on`` and ``off``, by the name in its config.

    Other threads, and other models that share the config, see that name too; the functions below pass them on to the
    implementation that was there before.
    """

    _of_config: ClassVar[WeakValueDictionary[int, "AttentionSwitch"]] = WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, config: Any) -> None:
        """Make the switch of a config; ``of`` is how others get it."""
        self._config = config
        self._before: str | None = None
        self._depths: dict[int, int] = {}  # forwards under way, of each thread

    @classmethod
    def of(cls, config: Any) -> "AttentionSwitch":
        """Return the one switch of a config; it lives as long as somebody keeps it."""
        with cls._lock:
            switch = cls._of_config.get(id(config))
            if switch is None:
                switch = cls._of_config[id(config)] = cls(config)
            return switch

    @property
    def implementation(self) -> str | None:
        """The implementation that everybody else uses."""
        current: str | None = self._config._attn_implementation_internal  # noqa: SLF001 - what the property returns (5.24)
        return self._before if current == NAME else current

    @property
    def mine(self) -> bool:
        """Whether this thread has switched it on."""
        return self._depths.get(threading.get_ident(), 0) > 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Name this implementation while the block runs, and put back what was there, whatever happens."""
        with self._counted(+1):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Take part in nothing while the block runs: a forward of this thread that is not a tiered one."""
        with self._counted(-self._depths.get(threading.get_ident(), 0)):
            yield

    @contextmanager
    def _counted(self, change: int) -> Iterator[None]:
        changed = False
        try:
            with deferred_interrupt():
                self._change(change)
                changed = True
            yield
        finally:
            # Ctrl-C on the way into the deferral would leave the name in the config for good: so once more.
            pressed: BaseException | None = None
            while changed:
                try:
                    with deferred_interrupt():
                        changed = False
                        self._change(-change)
                except BaseException as error:
                    if not changed:
                        raise
                    pressed = error
            if pressed is not None:
                raise pressed

    def _change(self, change: int) -> None:
        with self._lock:
            ident = threading.get_ident()
            self._depths[ident] = self._depths.get(ident, 0) + change
            if not self._depths[ident]:
                del self._depths[ident]
            # Not the public setter, which changes sub-configs (those of vision towers) too (5.24).
            current = self._config._attn_implementation_internal  # noqa: SLF001
            if self._depths and current != NAME:
                self._before = current
                self._config._attn_implementation_internal = NAME  # noqa: SLF001
            elif not self._depths and current == NAME:
                self._config._attn_implementation_internal = self._before  # noqa: SLF001


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to all tokens of a cached layer; called by the model.

    Args:
        module: the attention layer.
        query: ``[rows, query_heads, tokens, key_dim]``.
        key: the new tokens' keys, which the layer of the cache was given.
        value: the new tokens' values.
        attention_mask: not used: what may be seen follows from positions and padding.
        kwargs: the layer of the cache; ``scaling``, ``softcap`` and ``s_aux`` (sinks); what other implementations want.

    Returns:
        ``[rows, tokens, query_heads, value_dim]`` and None in place of the weights.

    Raises:
        UnsafeCall: the model asks for what is not built.
    """
    layer = kwargs.get(HANDLE)
    if layer is None:  # of another thread, or another model with this config: it has its own mask and all K and V
        return _implementation_before(module)(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None] + ["dropout"] * bool(kwargs.get("dropout"))
    if unknown:
        raise UnsafeCall(f'attention with {" and ".join(unknown)} cannot read blocks; set attention.path = "gathered"')
    scale = kwargs.get("scaling")
    if scale is None:
        scale = getattr(module, "scaling", query.shape[-1] ** -0.5)
    return layer.attend(query, scale=scale, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux")), None


def _implementation_before(module: torch.nn.Module) -> Callable[..., Any]:
    name = AttentionSwitch.of(module.config).implementation
    if name == "eager":  # every modeling file has its own (5.24)
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Build no mask for a forward that reads blocks: of queries by tokens, it would cost more than attention itself."""
    switch = AttentionSwitch.of(kwargs["config"])
    if switch.mine:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[switch.implementation](*args, **kwargs)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
