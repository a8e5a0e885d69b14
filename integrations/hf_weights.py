"""ModelWeights: what decides a model's KV besides ids, as a stamp for this process and a fingerprint for all of them.

KV that was computed with other weights is wrong, whatever the model is called. The stamp notices within a process that
weights were replaced, trained or merged, and that another adapter is active. The fingerprint reads every weight once (some
10 GB/s on a CPU; a GPU's weights come over its wire) and is the same in every process that loads the same model.

What neither can know is what code does that somebody put into the model: forward hooks, replaced forwards. Such a model is
not trusted with prefixes (``why_unknown``), unless the hook says of itself that it only looks: ``hook.tierkv_observes =
True``. Writing a few numbers through ``weight.data`` leaves no trace either; who does that calls
``engine.forget_prefixes()``.
"""

import functools
import hashlib
from collections.abc import Iterable
from typing import Any, Final

import torch
import xxhash
from transformers import PreTrainedModel

from tierkv.integrations.hf_compat import text_config, watched_modules

_SAMPLES: Final = 8
"""Numbers of each weight that the stamp looks at: writing through ``weight.data`` leaves no other trace."""
_PIECE_BYTES: Final = 64 << 20
_ADAPTER_STATE: Final = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
"""What decides which adapters of a layer take part, under the names that PEFT's tuner layers have."""
_MARK: Final = "active_adapters"
_TRUSTED: Final = ("transformers.", "accelerate.", "torch.")
"""Libraries whose hooks are part of running a model, not a change of it."""
_MOST_STAMPS: Final = 16


class ModelWeights:
    """The state of one model. Called by the thread inside the engine's gate."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Look at ``model``, changing nothing."""
        self._model = model
        self._modules: list[torch.nn.Module] = []
        self._tensors: list[torch.Tensor] = []
        self._adapted: list[tuple[str, torch.nn.Module]] = []
        self._traces: dict[bytes, tuple[Any, ...]] = {}  # of the latest stamps

    @torch.compiler.disable
    def stamp(self) -> bytes:
        """Return bytes that change when a weight changes or another adapter is active. Good within this process only."""
        model = self._model
        named = list(model.named_modules())
        self._modules = [module for _, module in named]
        # A model has methods of these names, to ask its layers.
        self._adapted = [(name, module) for name, module in named if _is_adapted(module)]
        self._tensors = [tensor for _, tensor in _tensors(model)]
        digest = hashlib.sha256(repr(_adapters(self._adapted)).encode())
        samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            digest.update(b"%d %d;" % (tensor.data_ptr(), _version(tensor)))
            if tensor.numel() and tensor.device.type != "meta" and tensor.is_contiguous() and type(tensor) in _PLAIN:
                few = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)]
                samples.setdefault((tensor.device, tensor.dtype), []).append(few)
        for parts in samples.values():
            digest.update(torch.cat(parts).cpu().view(torch.uint8).numpy().data)
        settings = {name: value for name, value in vars(text_config(model)).items() if not name.startswith("_")}
        digest.update(repr(sorted(settings.items(), key=lambda pair: pair[0])).encode())
        stamp = digest.digest()
        self._traces[stamp] = self._trace()
        while len(self._traces) > _MOST_STAMPS:
            del self._traces[next(iter(self._traces))]
        return stamp

    @torch.compiler.disable
    def unchanged_since(self, stamp: bytes) -> bool:
        """Whether nothing that shows at once is different from when the stamp was taken. Some microseconds, for each token."""
        return bool(self._modules) and self._traces.get(stamp) == self._trace()

    @torch.compiler.disable
    def why_unknown(self) -> str:
        """Return what code may change the KV in ways that nobody can see; empty where there is none."""
        if any(_is_strange(hook) for module in self._model.modules() for hook in _hooks(module)):
            return "forward hooks, which may change what is computed (set hook.tierkv_observes = True on one that only looks)"
        ours = set(watched_modules(self._model))
        if any(
            "forward" in vars(one) and one not in ours and not hasattr(one, "_hf_hook") for one in self._model.modules()
        ):
            return "a replaced forward of a layer, which may change what is computed"
        return ""

    def fingerprint(self) -> str:
        """Return a digest of the names and bytes of all weights and buffers, and of what is active of the adapters.

        Raises:
            RuntimeError: a weight cannot be read (one that is offloaded, for example).
        """
        model = self._model
        adapted = [(name, module) for name, module in model.named_modules() if _is_adapted(module)]
        digest = xxhash.xxh3_128(repr(_adapters(adapted)).encode())
        for name, weight in sorted(_tensors(model), key=lambda pair: pair[0]):
            if weight.device.type == "meta":
                raise RuntimeError(f"weight {name} is not loaded")
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
            flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
            for begin in range(0, flat.numel(), _PIECE_BYTES):
                digest.update(flat[begin : begin + _PIECE_BYTES].cpu().numpy().data)
        return digest.hexdigest()

    def _trace(self) -> tuple[Any, ...]:
        hooks = [id(hook) for module in self._modules for hook in _hooks(module) if _is_strange(hook)]
        return sum(map(_version, self._tensors)), _adapters(self._adapted), hooks


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def rotates_by_length(model: PreTrainedModel) -> bool:
    """Whether a model's rotary embedding depends on how long a forward is, and so its KV on more than the ids before."""
    config = text_config(model)
    found = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            if {str(one.get("rope_type")), str(one.get("type"))} & {"dynamic", "longrope", "su"}:
                return True
            found += one.values()
    return False


def _tensors(model: PreTrainedModel) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    rotates = rotates_by_length(model)  # then each forward writes its frequencies
    for name, buffer in model.named_buffers():
        if not (rotates and "inv_freq" in name):
            yield name, buffer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - as autograd itself does


def _is_adapted(module: torch.nn.Module) -> bool:
    """Whether adapters have been put on a layer. A model has methods of the same names, to ask its layers."""
    return (_MARK in vars(module) or hasattr(type(module), _MARK)) and not isinstance(module, PreTrainedModel)


def _adapters(adapted: Iterable[tuple[str, torch.nn.Module]]) -> list[Any]:
    return [
        (name, [(field, repr(getattr(module, field, None))) for field in _ADAPTER_STATE]) for name, module in adapted
    ]


def _hooks(module: torch.nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]  # noqa: SLF001 - no public way


def _is_strange(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    home = str(getattr(function, "__module__", "")) + "."
    return not home.startswith(_TRUSTED) and not getattr(function, "tierkv_observes", False)
