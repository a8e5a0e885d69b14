"""What a user may hand to ``generate`` and to the verbs of a cache, and the sentence that refuses the rest.

Checked is what tierkv itself looks at, and what transformers would answer with an error from deep inside; where
transformers has a sentence of its own, that one is the answer.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import GenerationConfig, PreTrainedModel

from tierkv.errors import UnsafeCall
from tierkv.integrations.hf_compat import vocabulary_size

_HOOKS: Final = ("logits_processor", "stopping_criteria")
_SHAPES: Final = {
    "inputs": ("rows", "tokens"),
    "input_ids": ("rows", "tokens"),
    "attention_mask": ("rows", "tokens"),
    "inputs_embeds": ("rows", "tokens", "hidden size"),
    "position_ids": (),  # any shape: what does not fit is not taken for the usual one
}
FED: Final = ("input_ids", "inputs_embeds")
"""The arguments of a forward that bring its new tokens."""


# -- the verbs of a cache ---------------------------------------------------------------------------------------------


def whole_number(legal: str, value: Any) -> int:
    """Return the number that a verb was given; ``legal`` says what it takes.

    Raises:
        UnsafeCall: it is not a whole number.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass  # said below, as for a bool
    raise UnsafeCall(f"{legal}, not {_shown(value)}")


def row_indices(verb: str, indices: Any, rows: int) -> list[int]:
    """Return the rows that a verb is to keep, in order.

    Args:
        verb: its name, for the message.
        indices: whole numbers ``[chosen]`` or a bool mask ``[rows]``: a tensor of int64, int32 or bool, or a list.
        rows: rows of the cache; 0 while it is empty, and then only type and shape can be wrong.

    Raises:
        UnsafeCall: of another type or shape, no row at all, or a row that does not exist.
    """
    legal = f"{verb} takes row numbers"
    if rows:
        legal += f" from 0 to {rows - 1}, or a bool for each of the {rows} rows"
    try:
        chosen = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        raise UnsafeCall(f"{legal}, not {_shown(indices)}") from None
    usual = chosen.dim() == 1 and chosen.dtype in (torch.int64, torch.int32, torch.bool)
    if chosen.numel() and not usual:  # an empty list becomes a tensor of floats
        raise UnsafeCall(f"{legal}, not {_shown(chosen)}")
    if chosen.dtype == torch.bool:
        if rows and len(chosen) != rows:
            raise UnsafeCall(f"{legal}, not {len(chosen)} bools")
        chosen = chosen.nonzero().flatten()
    if not chosen.numel():
        raise UnsafeCall(f"{legal}, and at least one; to drop all rows call cache.reset()")
    numbers: list[int] = chosen.tolist()
    for number in numbers:
        if number < 0 or 0 < rows <= number:
            raise UnsafeCall(f"{legal}; there is no row {number}")
    return numbers


# -- generate ---------------------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):  # the last is a tensor of several numbers
        return False


def _are_ids(value: Any) -> bool:
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


_NUMBERS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "num_beams": ("a whole number, at least 1", _is_count),
    "num_return_sequences": ("a whole number, at least 1", _is_count),
    "max_new_tokens": ("a number of tokens", _is_finite),
    "max_length": ("a number of tokens", _is_finite),
    "eos_token_id": ("a token id or a list of them", _are_ids),
}


def check_caches(given: dict[str, Any]) -> Any:
    """Return the cache among those that were given, by the name of the argument; None where none was.

    Raises:
        UnsafeCall: there are two, or it is none.
    """
    caches = list(given.values())
    if any(cache is not caches[0] for cache in caches):
        raise UnsafeCall(f"{' and '.join(given)} bring different caches; pass one, as cache=")
    for name, cache in given.items():
        if not hasattr(cache, "get_seq_length"):
            raise UnsafeCall(
                f"{name} must be what engine.new_cache() returns, or a transformers Cache, not {_shown(cache)}"
            )
    return caches[0] if caches else None


def check_settings(named: dict[str, Any]) -> None:
    """Check the settings of one call of ``generate``, by name, before a generation config is made of them.

    Raises:
        UnsafeCall: one is of a type or value that no call can mean.
    """
    config = named.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise UnsafeCall(
            f"generation_config must be a transformers GenerationConfig, not {_shown(config)}; pass everything but the ids "
            f"by name"
        )
    for name, (legal, fits) in _NUMBERS.items():
        value = named.get(name, getattr(config, name, None))
        if value is not None and not fits(value):
            raise UnsafeCall(f"{name} must be {legal}, not {_shown(value)}")
    streamer = named.get("streamer")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise UnsafeCall(
            f"streamer must have put and end, as transformers' TextStreamer has, not be {_shown(streamer)}"
        )
    for name in _HOOKS:
        if named.get(name) is not None and not isinstance(named[name], list):
            raise UnsafeCall(f"{name} must be a list, not {_shown(named[name])}")


def check_prompt(model: PreTrainedModel, named: dict[str, Any]) -> None:
    """Check the tensors of one call of ``generate``, by name.

    Raises:
        UnsafeCall: ids, embeddings, mask or positions are not what the model takes.
    """
    check_tensors(named, tuple(_SHAPES))
    ids, fed, mask = named.get("input_ids"), named.get("inputs_embeds"), named.get("attention_mask")
    if ids is None and model.main_input_name == "input_ids":
        ids = named.get("inputs")
    if fed is None and ids is not None:
        _check_ids(ids, vocabulary_size(model))
        fed = ids
    if fed is not None and mask is not None and mask.dim() == 2 and mask.shape[0] not in (1, fed.shape[0]):
        raise UnsafeCall(
            f"attention_mask has {mask.shape[0]} rows for {fed.shape[0]} prompts; pass a row for each prompt"
        )


def check_tensors(named: dict[str, Any], names: tuple[str, ...]) -> None:
    """Check that the arguments ``names``, where they are given, are tensors with enough dimensions.

    Raises:
        UnsafeCall: one is not.
    """
    for name in names:
        value, shape = named.get(name), _SHAPES[name]
        if value is not None and not (isinstance(value, torch.Tensor) and value.dim() >= len(shape)):
            wanted = f"a tensor [{', '.join(shape)}]" if shape else "a tensor"
            hint = "; a tokenizer makes one with return_tensors='pt'" if len(shape) == 2 else ""
            raise UnsafeCall(f"{name} must be {wanted}, not {_shown(value)}{hint}")


def _check_ids(ids: torch.Tensor, vocabulary: int | None) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise UnsafeCall(f"input_ids must be int64 or int32, not {_shown(ids)}")
    if not ids.numel():
        raise UnsafeCall(f"input_ids {list(ids.shape)} hold no token; pass at least one prompt of at least one token")
    if vocabulary is None:
        return
    least, most = (int(end) for end in ids.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise UnsafeCall(f"input_ids hold {wrong}, which is no token of this model; legal: 0 to {vocabulary - 1}")


def _shown(value: Any) -> str:
    """Say in a few words what was passed."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"a {type(value).__name__}"
