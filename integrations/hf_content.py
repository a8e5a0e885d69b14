"""CacheContent: which token ids a cache holds, row by row, so that a call that does not continue them is noticed.

transformers never compares the ids of a call with what the cache it is given was computed from; a cache of other
content gives wrong tokens without a word. So the ids and the padding mask of every committed forward are kept beside
the blocks, 11 bytes a token, on the device where they arrive.

Ids do not always decide KV. A token counts as *known* only where they do: its id was seen, its position is the one that
``generate`` would give it, and nothing else that was passed to the forward could have changed it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tierkv.prefix_rows import KeyedRow


@dataclass(frozen=True)
class ForwardInputs:
    """What decides the KV that one forward computes.

    Attributes:
        count: tokens that are fed to each row.
        ids: token ids ``[rows, tokens]``, or None where embeddings were passed.
        mask: 2-D attention mask ``[rows, at least past + tokens]``, or None for all ones.
        positions: position ids as they were passed, or None.
        implied_positions: without ``positions`` the model counts attended tokens by itself (it takes no position ids).
        usual_mask: the mask is 2-D or absent, not one of the caller's own shape.
        ids_decide: no other argument (images, token types, adapters' inputs) has a say.
    """

    count: int
    ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    implied_positions: bool = False
    usual_mask: bool = True
    ids_decide: bool = True


class CacheContent:
    """Ids, padding mask and what is known of every committed token of a cache.

    Attributes:
        length: committed tokens.
        keyed: per row, what it has prefix keys for; empty until somebody asks for keys.
        answer_begins: the place from which ids are an answer, or None.
        end_ids: ids by which an answer ends. A row of a batch that has answered goes on with padding that nobody marks.
    """

    def __init__(self) -> None:
        """Make the content of an empty cache."""
        self.length = 0
        self.keyed: list[KeyedRow] = []
        self.answer_begins: int | None = None
        self.end_ids: frozenset[int] = frozenset()
        self._ids: torch.Tensor | None = None  # [rows, room] int64
        self._mask: torch.Tensor | None = None  # [rows, room] bool, False where a token is padding
        self._known: torch.Tensor | None = None  # [room] bool, in every row
        self._placed: torch.Tensor | None = None  # [room] bool: the position at least is the usual one
        self._padded: bool | None = False  # None: look

    @property
    def ids(self) -> torch.Tensor | None:
        """Token ids ``[rows, length]``, int64, or None while empty."""
        return None if self._ids is None else self._ids[:, : self.length]

    @property
    def mask(self) -> torch.Tensor | None:
        """Padding mask ``[rows, length]``, bool: False where a token is padding."""
        return None if self._mask is None else self._mask[:, : self.length]

    @property
    def continues(self) -> bool:
        """Whether every token has its usual position, so that new ids after it get the right ones."""
        return self._placed is None or bool(self._placed[: self.length].all())

    @property
    def padded(self) -> bool:
        """Whether any row holds padding."""
        if self._padded is None:
            self._padded = self._mask is not None and not bool(self._mask[:, : self.length].all())
        return self._padded

    def append(self, inputs: ForwardInputs, rows: int, count: int, device: torch.device) -> None:
        """Note a committed forward of ``count`` tokens in each of ``rows`` rows; see ``ForwardInputs``."""
        begin, end = self.length, self.length + count
        self._grow(rows, end, device)
        assert self._ids is not None
        assert self._mask is not None
        assert self._known is not None
        assert self._placed is not None
        self.length = end
        if inputs.mask is None:
            self._mask[:, begin:end] = True
        else:
            new_mask = inputs.mask[:, begin:end].to(device, torch.bool)
            self._mask[:, begin:end] = new_mask
            if not self._padded and not bool(new_mask.all()):
                self._padded = True
        self._placed[begin:end] = self._usual_positions(inputs, begin, end) if inputs.usual_mask else False
        ids = inputs.ids
        if ids is None or not inputs.ids_decide or tuple(ids.shape) != (rows, count):
            self._ids[:, begin:end] = 0
            self._known[begin:end] = False
        else:
            self._ids[:, begin:end] = ids
            self._known[begin:end] = self._placed[begin:end]

    def common_prefix(self, ids: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Return how many leading tokens are known and the same in all rows of ``ids`` and ``mask`` ``[rows, n]``."""
        if self._ids is None or self._mask is None or self._known is None:
            return 0
        count = min(self.length, ids.shape[1])
        device = self._ids.device
        same = (self._ids[:, :count] == ids[:, :count].to(device)).all(dim=0) & self._known[:count]
        if mask is None:
            same &= self._mask[:, :count].all(dim=0)
        else:
            same &= (self._mask[:, :count] == mask[:, :count].to(device, torch.bool)).all(dim=0)
        different = (~same).nonzero()
        return int(different[0]) if different.numel() else count

    def same_padding(self, mask: torch.Tensor | None) -> bool:
        """Return whether a forward's 2-D mask agrees with the padding that the cached tokens were computed with."""
        held = self.mask
        if held is None or held.shape[1] == 0:
            return True
        if mask is None:
            return not self.padded
        if mask.shape[0] not in (1, held.shape[0]):  # one row stands for all
            return True  # the wrong number of rows is refused elsewhere
        count = min(held.shape[1], mask.shape[1])
        return bool((held[:, :count] == mask[:, :count].to(held.device, torch.bool)).all())

    def crop(self, length: int, block_size: int) -> None:
        """Keep the first ``length`` tokens; blocks of ``block_size`` have the keys."""
        self.length = min(self.length, length)
        self._padded = None if self._padded else self._padded
        for row in self.keyed:
            row.crop(self.length, block_size)

    def known_length(self) -> int:
        """Return how many leading tokens are known in all rows."""
        if self._known is None:
            return 0
        unknown = (~self._known[: self.length]).nonzero()
        return int(unknown[0]) if unknown.numel() else self.length

    @torch.inference_mode(mode=False)
    def select(self, indices: Sequence[int]) -> None:
        """Make row ``i`` what row ``indices[i]`` is now."""
        self.keyed = [self.keyed[index].copy() for index in indices] if self.keyed else []
        if self._ids is not None and self._mask is not None:
            index = torch.tensor(indices, dtype=torch.long, device=self._ids.device)
            self._ids, self._mask = self._ids[index], self._mask[index]
            self._padded = None if self._padded else self._padded

    @torch.inference_mode(mode=False)
    def fork(self) -> "CacheContent":
        """Return an independent copy."""
        twin = CacheContent()
        twin.length, twin._padded = self.length, self._padded
        twin.keyed = [row.copy() for row in self.keyed]
        twin.answer_begins, twin.end_ids = self.answer_begins, self.end_ids
        twin._ids, twin._mask = _clone(self._ids), _clone(self._mask)
        twin._known, twin._placed = _clone(self._known), _clone(self._placed)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "CacheContent":
        return self.fork()

    @torch.inference_mode(mode=False)  # later forwards may run outside of this one's mode
    def _grow(self, rows: int, length: int, device: torch.device) -> None:
        if self._ids is not None and self._ids.shape[1] >= length:
            return
        room = max(64, 2 * length)  # doubling keeps the cost per token constant
        self._ids = _enlarged(self._ids, torch.zeros((rows, room), dtype=torch.int64, device=device))
        self._mask = _enlarged(self._mask, torch.ones((rows, room), dtype=torch.bool, device=device))
        self._known = _enlarged(self._known, torch.zeros(room, dtype=torch.bool, device=device))
        self._placed = _enlarged(self._placed, torch.zeros(room, dtype=torch.bool, device=device))

    def _usual_positions(self, inputs: ForwardInputs, begin: int, end: int) -> "torch.Tensor | bool":
        """Say for each new token whether its position is what ``generate`` gives it: attended tokens before it."""
        if inputs.positions is None:
            return inputs.implied_positions or not self.padded
        assert self._mask is not None
        mask = self._mask[:, :end] if self.padded else None
        same = positions_are_usual(inputs.positions.to(self._mask.device), mask, begin, end)
        return False if same is None else same


def positions_are_usual(
    positions: torch.Tensor, mask: torch.Tensor | None, begin: int, end: int
) -> torch.Tensor | None:
    """Say for each token from ``begin`` to ``end`` whether its position is the number of attended tokens before it.

    Args:
        positions: ``[rows, end - begin]``, or several such planes, one for each part of a rotary embedding.
        mask: padding mask ``[rows, end]``, bool, or None for all ones.
        begin: first token.
        end: behind the last token.

    Returns:
        Bool ``[end - begin]``, true where it holds in all rows and planes; None where the shapes do not fit.
    """
    if positions.dim() < 2 or positions.shape[-1] != end - begin:
        return None
    if mask is None:
        same = positions == torch.arange(begin, end, device=positions.device)
    else:
        usual = mask.long().cumsum(dim=1)[:, begin:] - 1
        same = (positions == usual) | ~mask[:, begin:]
    return same.flatten(0, -2).all(dim=0)


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _enlarged(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    if old is not None:
        new[..., : old.shape[-1]] = old
    return new
