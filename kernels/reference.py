"""What the kernels compute, in plain PyTorch over dense tensors: the specification that tests compare them with."""

from collections.abc import Sequence

import torch


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the tokens that each query may see: its own position and those before it, within its window.

    Scores, softmax and sums are computed in float64 where the query is float64, else in float32.

    Args:
        query: ``[rows, query_heads, queries, key_dim]``; query ``i`` stands at position ``start + i``.
        keys: ``[rows, kv_heads, tokens, key_dim]``; ``query_heads`` is a multiple of ``kv_heads``.
        values: ``[rows, kv_heads, tokens, value_dim]``.
        positions: int64 ``[rows, tokens]``; negative where a row has no such token.
        start: position of the first query, the same in all rows.
        scale: factor of the scores.
        window: tokens that a query sees, itself included; None for all.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        The output ``[rows, queries, query_heads, value_dim]`` and the log-sum-exp (natural logarithm) of the scores
        ``[rows, queries, query_heads]``. A query that sees nothing has output 0 and log-sum-exp -inf.
    """
    rows, query_heads, queries, _ = query.shape
    kv_heads, tokens = keys.shape[1:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(dtype).reshape(rows, kv_heads, query_heads // kv_heads, queries, -1)
    scores = torch.einsum("rhgqd,rhtd->rhgqt", grouped, keys.to(dtype)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    own = start + torch.arange(queries, device=query.device)
    visible = (positions[:, None, :] >= 0) & (positions[:, None, :] <= own[:, None])  # [rows, queries, tokens]
    if window is not None:
        visible &= positions[:, None, :] > own[:, None] - window
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if tokens else scores.new_full(scores.shape[:-1], float("-inf"))
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])
    # A token that nobody sees may hold anything, and 0 times NaN is NaN.
    seen = (positions >= 0)[:, None, :, None]
    out = torch.einsum("rhgqt,rhtd->rhgqd", weights, values.to(dtype).masked_fill(~seen, 0))
    return out.flatten(1, 2).transpose(1, 2).contiguous(), lse.flatten(1, 2).transpose(1, 2).contiguous()


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of tokens (Ye et al., FlashInfer, section 2.2; Milakov and Gimelshein 2018).

    Args:
        parts: outputs ``[rows, queries, query_heads, value_dim]`` and log-sum-exps ``[rows, queries, query_heads]``.
        sinks: a score ``[query_heads]`` that takes part in the softmax and contributes nothing to the output.

    Returns:
        Output and log-sum-exp over all tokens, of the parts' dtype.
    """
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    if sinks is not None:
        lses = torch.cat([lses, sinks.to(lses.dtype).expand(1, *lses.shape[1:])])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0))[: len(parts)]
    return (weights[..., None] * outs).sum(dim=0), lse
