"""Replay: lets ``generate`` run a second time from the same ids as if the first run had not been.

The second run draws the same random numbers, the user's streamer does not see the same tokens twice, and the user's
logits processors and stopping criteria are as they were.
"""

import copy
import random
from collections import deque
from typing import Any, Final

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

_PLAIN: Final = (
    bool, int, float, str, bytes, list, tuple, dict, set, deque, torch.Tensor, np.ndarray, random.Random, np.random.Generator,
)  # fmt: skip


class Replay:
    """What must be put back before a second run; made before the first."""

    def __init__(self, arguments: dict[str, Any], device: torch.device) -> None:
        """Note the present state, and wrap the streamer among ``arguments`` (of ``generate``, by name) in place."""
        self._device = device
        self._random = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        hooks = [*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ())]
        self._attributes = [(hook, _copied(vars(hook))) for hook in hooks if hasattr(hook, "__dict__")]
        self._streamer: ReplayStreamer | None = None
        if arguments.get("streamer") is not None:
            self._streamer = arguments["streamer"] = ReplayStreamer(arguments["streamer"])

    def start_over(self) -> None:
        """Put everything back."""
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        for hook, attributes in self._attributes:
            vars(hook).clear()
            vars(hook).update(attributes)
        if self._streamer is not None:
            self._streamer.start_over()


class ReplayStreamer(BaseStreamer):
    """Wraps the user's streamer; after ``start_over`` it drops as many tokens as it had passed on."""

    def __init__(self, streamer: Any) -> None:
        """Wrap ``streamer``."""
        self._streamer = streamer
        self._passed = 0
        self._skip = 0

    def start_over(self) -> None:
        """The same tokens come again from the start."""
        self._skip = self._passed

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens on, unless they were passed on before the second run began."""
        count = value.numel()
        if self._skip >= count:
            self._skip -= count
            return
        fresh = value.flatten()[self._skip :] if self._skip else value
        self._skip = 0
        self._passed += count
        self._streamer.put(fresh)

    def end(self) -> None:
        """Pass the end on."""
        self._streamer.end()


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy what is plain data; anything else (a tokenizer, a model) is not state that a run changes."""
    return {name: copy.deepcopy(value) if isinstance(value, _PLAIN) else value for name, value in attributes.items()}
