"""CacheContent: which token ids a cache holds, row by row, so that a call that does not continue them is noticed.

transformers never compares the ids of a call with what the cache it is given was computed from; a cache of other
content gives wrong tokens without a word. So the ids (and the padding mask) of every committed forward are kept beside
the blocks, 9 bytes a token, on the device where they arrive: no synchronisation per token.
"""

from collections.abc import Sequence
from typing import Any

import torch


class CacheContent:
    """Ids ``[rows, length]`` and mask ``[rows, length]`` of a cache; unknown once a forward passed without ids."""

    def __init__(self) -> None:
        """Make the content of an empty cache."""
        self._ids: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self.length = 0
        self.known = True

    @property
    def ids(self) -> torch.Tensor | None:
        """Token ids ``[rows, length]``, int64, or None while empty."""
        return None if self._ids is None else self._ids[:, : self.length]

    @property
    def mask(self) -> torch.Tensor | None:
        """Padding mask ``[rows, length]``, bool: False where a token is padding."""
        return None if self._mask is None else self._mask[:, : self.length]

    def append(self, ids: torch.Tensor | None, mask: torch.Tensor | None, count: int) -> None:
        """Note a committed forward of ``count`` tokens.

        Args:
            ids: ``[rows, count]``, or None where the forward was given embeddings or no ids were seen.
            mask: 2-D attention mask ``[rows, at least length + count]`` of the forward, or None for all ones.
        """
        self.length += count
        if not self.known or ids is None or ids.dim() != 2 or ids.shape[1] != count:
            self.known = False
            return
        begin = self.length - count
        rows = ids.shape[0]
        if self._ids is None or self._mask is None or self._ids.shape[1] < self.length:
            # Doubling keeps the cost per token constant.
            room = max(64, 2 * self.length)
            grown_ids = torch.zeros((rows, room), dtype=torch.int64, device=ids.device)
            grown_mask = torch.ones((rows, room), dtype=torch.bool, device=ids.device)
            if self._ids is not None and self._mask is not None:
                grown_ids[:, :begin] = self._ids[:, :begin]
                grown_mask[:, :begin] = self._mask[:, :begin]
            self._ids, self._mask = grown_ids, grown_mask
        self._ids[:, begin : self.length] = ids
        if mask is None:
            self._mask[:, begin : self.length] = True
        else:
            self._mask[:, begin : self.length] = mask[:, begin : self.length].to(torch.bool)

    def common_prefix(self, ids: torch.Tensor) -> int:
        """Return how many leading tokens ``ids`` ``[rows, n]`` shares with the content, over all rows."""
        held = self.ids
        if held is None:
            return 0
        count = min(held.shape[1], ids.shape[1])
        same = (held[:, :count] == ids[:, :count].to(held.device)).all(dim=0)
        different = (~same).nonzero()
        return int(different[0]) if different.numel() else count

    def same_padding(self, mask: torch.Tensor | None) -> bool:
        """Return whether a forward's 2-D mask agrees with the padding that the cached tokens were computed with."""
        held = self.mask
        if held is None or not self.known:
            return True
        if mask is None:
            return bool(held.all())
        count = min(held.shape[1], mask.shape[1])
        return bool((held[:, :count] == mask[:, :count].to(held.device, torch.bool)).all())

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self.length = min(self.length, length)
        if self.length == 0:
            self.known = True
            self._ids = self._mask = None

    def select(self, indices: Sequence[int]) -> None:
        """Make row ``i`` what row ``indices[i]`` is now."""
        if self._ids is not None and self._mask is not None:
            index = torch.tensor(indices, device=self._ids.device)
            self._ids, self._mask = self._ids[index], self._mask[index]

    def fork(self) -> "CacheContent":
        """Return an independent copy."""
        twin = CacheContent()
        twin.length, twin.known = self.length, self.known
        twin._ids = None if self._ids is None else self._ids.clone()
        twin._mask = None if self._mask is None else self._mask.clone()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "CacheContent":
        return self.fork()
