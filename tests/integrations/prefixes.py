"""What the tests of prefixes share: a count of the tokens that a model really computes, and settings that keep prefixes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

GREEDY = {"do_sample": False, "max_new_tokens": 12}
BLOCK = 16


@contextmanager
def fed(model: Any) -> Iterator[list[int]]:
    """Count the tokens that reach the model's embedding, forward by forward, summed over rows."""
    counts: list[int] = []

    def count(_, args):
        counts.append(args[0].numel())

    count.tierkv_observes = True  # type: ignore[attr-defined]
    handle = model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def roomy(path: Path, *, persist: bool = False, attention: str = "auto", **prefix: Any) -> dict[str, Any]:
    """Return settings whose device holds everything; ``prefix`` go into that section."""
    store = {"persist": True, "write_policy": "always", "min_tokens": 0} if persist else {}
    return {
        "block_size": BLOCK,
        "device": {"capacity": "16MiB"},
        "host": {"capacity": 0},
        "disk": {"path": str(path), "capacity": "64MiB" if persist else 0},
        "attention": {"path": attention},
        "prefix": store | prefix,
    }


def first_forward(model: Any, batch: dict[str, torch.Tensor], **settings: Any) -> tuple[torch.Tensor, int]:
    """Generate; return the tokens, and how many were computed for the prompt."""
    with fed(model) as counts:
        out = model.generate(**batch, **(GREEDY | settings))
    return out, counts[0]
