"""ReplayStreamer: a streamer that stays silent about tokens it has already passed on.

When ``generate`` runs a second time from the same ids and random state, the user's streamer must not see the same
tokens twice.
"""

from typing import TYPE_CHECKING, Any

from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    import torch

    from tierkv.integrations.hf_call import GenerateCall


class ReplayStreamer(BaseStreamer):
    """Wraps the user's streamer; after ``start_over`` it drops as many tokens as it had passed on."""

    def __init__(self, streamer: Any) -> None:
        """Wrap ``streamer``."""
        self._streamer = streamer
        self._passed = 0
        self._skip = 0

    @classmethod
    def around(cls, call: "GenerateCall") -> "ReplayStreamer | None":
        """Wrap the streamer of a call in place; None where it has none."""
        streamer = call.kwargs.get("streamer")
        if streamer is None:
            return None
        replay = cls(streamer)
        call.kwargs["streamer"] = replay
        return replay

    def start_over(self) -> None:
        """The same tokens come again from the start."""
        self._skip = self._passed

    def put(self, value: "torch.Tensor") -> None:
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
