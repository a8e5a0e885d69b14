"""What a model's weights are: a stamp that is cheap enough for every call, and a fingerprint that means the same everywhere.

KV that was computed with other weights is wrong, whatever the model is called. The stamp notices within a process that
weights were replaced, trained, merged or that another adapter is active. The fingerprint reads every weight once (some
10 GB/s on a CPU; a GPU's weights come over its wire) and is the same in every process that loads the same model.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import torch
import xxhash
from transformers import PreTrainedModel

_SAMPLES: Final = 8
"""Numbers of each weight that the stamp looks at: writing through ``weight.data`` leaves no other trace."""
_PIECE_BYTES: Final = 64 << 20
_ADAPTER_STATE: Final = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
"""What decides which adapters of a layer take part, under the names that PEFT's tuner layers have."""
_MARK: Final = "active_adapters"


@torch.compiler.disable
def weights_stamp(model: PreTrainedModel) -> bytes:
    """Return bytes that change when a weight changes or another adapter is active. Good within this process only."""
    stamp = hashlib.sha256(repr(_adapters(model)).encode())
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for weight in _tensors(model):
        version = 0 if weight.is_inference() else weight._version  # noqa: SLF001 - as autograd itself does
        stamp.update(b"%d %d;" % (weight.data_ptr(), version))
        if weight.numel() and weight.device.type != "meta":
            flat = (
                weight.detach().reshape(-1)[:: max(1, weight.numel() // _SAMPLES)] if weight.is_contiguous() else None
            )
            if flat is not None:
                samples.setdefault((weight.device, weight.dtype), []).append(flat)
    for parts in samples.values():
        stamp.update(torch.cat(parts).cpu().view(torch.uint8).numpy().data)
    return stamp.digest()


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of the names and bytes of all weights and buffers, and of what is active of the adapters."""
    digest = xxhash.xxh3_128(repr(_adapters(model)).encode())
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, weight in sorted(named, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), _PIECE_BYTES):
            digest.update(flat[begin : begin + _PIECE_BYTES].cpu().numpy().data)
    return digest.hexdigest()


def _tensors(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _adapters(model: PreTrainedModel) -> list[Any]:
    """Return the state of all layers that adapters have been put on."""
    return [
        (name, [(field, repr(getattr(module, field, None))) for field in _ADAPTER_STATE])
        for name, module in model.named_modules()
        # A model has methods of these names, to ask its layers.
        if (_MARK in vars(module) or hasattr(type(module), _MARK)) and not isinstance(module, PreTrainedModel)
    ]
