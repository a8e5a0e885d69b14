"""Cases that the Triton kernels are run with, interpreted and on a GPU, and how a result is judged."""

from dataclasses import dataclass, replace

import torch

from tests.kernels.triton_scenario import Case, Scenario
from tierkv.kernels import reference

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32

# Absolute, for outputs and log-sum-exps of normally distributed K and V. The log-sum-exp is float32 throughout; an
# output has its weights rounded to the dtype of V, so half a unit of that dtype in the last place.
OUT_TOLERANCE = {BFLOAT16: 5e-3, FLOAT16: 5e-4, FLOAT32: 4e-6}
LSE_TOLERANCE = 5e-6


ATTENTION = [
    Case("one token", rows=(1,)),
    Case("one row is one token", rows=(1, 70), splits=3),
    Case("empty row between others", rows=(33, 0, 65), splits=2),
    Case("nothing at all", rows=(0, 0), splits=2),
    Case("runs of 16", rows=(83,), lengths=(16,), splits=2),
    Case("runs of 256", rows=(300,), lengths=(256,), splits=2),
    Case("runs of 1, 17, 129 and 40", rows=(220, 187), lengths=(1, 17, 129, 40), splits=3),
    Case("more runs than one search step", rows=(299,), lengths=(1,), kv_heads=1, group=1, splits=4),
    Case("a gap in the positions", rows=(150,), lengths=(32,), gap=1000, splits=2),
    Case("runs from the middle of a sequence", rows=(100, 40), origin=500, queries=3, start=520, splits=2),
    Case("runs that no query has reached", rows=(50,), origin=500, start=10, splits=2),
    Case("runs that one query has just reached", rows=(50,), origin=500, queries=2, start=499, window=9, splits=2),
    Case("more splits than tokens", rows=(20,), splits=7),
    Case("one query head a KV head", group=1),
    Case("seven query heads a KV head", kv_heads=3, group=7),
    Case("one KV head of 20 query heads", kv_heads=1, group=20),
    Case("bfloat16", rows=(130, 77), dtype=BFLOAT16, splits=2),
    Case("float16", rows=(130, 77), dtype=FLOAT16, splits=2),
    Case("head of 32", key_dim=32, value_dim=32),
    Case("head of 80", key_dim=80, value_dim=80, dtype=BFLOAT16),
    Case("head of 96", key_dim=96, value_dim=96, dtype=FLOAT16),
    Case("head of 128", key_dim=128, value_dim=128, dtype=BFLOAT16, splits=2),
    Case("head of 256", rows=(70,), key_dim=256, value_dim=256, dtype=BFLOAT16),
    Case("head of 256 in float32", rows=(40,), key_dim=256, value_dim=256),
    Case("keys longer than values", key_dim=192, value_dim=128, dtype=BFLOAT16),
    Case("values longer than keys", key_dim=40, value_dim=72),
    Case("window", rows=(150, 20), window=37, splits=2),
    Case("window of one token", rows=(90,), window=1),
    Case("window begins a run", rows=(128,), lengths=(32,), window=64, splits=2),
    Case("window longer than the context", rows=(50,), window=1000),
    Case("window that has passed a row by", rows=(150, 20), window=30, start=160),
    Case("window and gap", rows=(100,), lengths=(32,), gap=50, window=75, queries=2, splits=2),
    Case("softcap", rows=(100,), softcap=5.0, key_size=3.0),
    Case("softcap near zero", rows=(1,), softcap=3000.0, key_size=0.1, kv_heads=8),
    Case("softcap where its two forms meet", rows=(1,), softcap=30.0, key_size=6.0, kv_heads=16),
    Case("softcap, window, bfloat16", rows=(140,), softcap=20.0, window=99, dtype=BFLOAT16, splits=2),
    Case("large keys", rows=(150,), key_size=3.0, splits=3),
    Case("queries before all tokens", rows=(30,), queries=3, start=0, gap=1),
    Case("tokens after the query", rows=(100, 130), start=60, splits=2),
    Case("a few queries", rows=(100, 75), queries=5, splits=2),
    Case("queries whose row ends before them", rows=(130, 40), queries=7, splits=2),
    Case("prefill", rows=(75,), queries=75, start=0, lengths=(32,)),
    Case("prefill in tiles", rows=(97,), queries=97, start=0, group=3, lengths=(48,), dtype=BFLOAT16),
    Case("prefill behind a prefix", rows=(160,), queries=40, start=120, dtype=FLOAT16, splits=2),
    Case("prefill with a window", rows=(140,), queries=90, start=50, window=33, group=1, dtype=BFLOAT16),
    Case("prefill with a window of one", rows=(60,), queries=60, start=0, window=1, kv_heads=1),
]


def check_attention(case: Case, device: torch.device) -> None:
    """Compare the kernel with the reference in float64."""
    from tierkv.kernels.triton_attention import attention

    scenario = Scenario(case, device)
    out, lse = attention(
        scenario.query,
        scenario.runs,
        scenario.member,
        start=scenario.start,
        scale=case.key_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        splits=case.splits,
    )
    expected_out, expected_lse = scenario.expected()
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=OUT_TOLERANCE[case.dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=LSE_TOLERANCE)
    unseen = expected_lse.isneginf()
    assert torch.equal(lse.isneginf(), unseen)
    assert not out[unseen].any()


def check_error(case: Case, device: torch.device) -> None:
    """Hold the error against float64 to 1.3 times that of PyTorch's attention in the same dtype."""
    from tierkv.kernels.triton_attention import attention

    scenario = Scenario(replace(case, splits=2), device)
    scale = case.key_dim**-0.5
    out, _ = attention(
        scenario.query, scenario.runs, scenario.member, start=scenario.start, scale=scale, splits=case.splits
    )
    expected, _ = scenario.expected()
    stock = torch.nn.functional.scaled_dot_product_attention(
        scenario.query, scenario.keys, scenario.values, scale=scale, enable_gqa=True
    ).transpose(1, 2)

    def error(got: torch.Tensor) -> float:
        return float((got.double() - expected).square().mean().sqrt())

    # Both rounded to the model's dtype, as the next layer is given them.
    assert error(out.to(case.dtype)) <= 1.3 * error(stock)


ERRORS = [
    Case(f"{str(dtype)[6:]}, keys times {size:g}", rows=(512,), dtype=dtype, key_size=size, splits=2)
    for dtype in (BFLOAT16, FLOAT16, FLOAT32)
    for size in (1.0, 3.0)
]


@dataclass(frozen=True)
class Merge:
    """Parts to merge; where one saw nothing its output is left as it was: NaN."""

    name: str
    parts: int
    dim: int = 64
    sinks: bool = False
    empty: tuple[int, ...] = ()
    size: float = 3.0

    def __str__(self) -> str:
        return self.name


MERGES = [
    Merge("one part", 1),
    Merge("two", 2),
    Merge("three of 80", 3, dim=80),
    Merge("33 of 256", 33, dim=256),
    Merge("one number each", 4, dim=1),
    Merge("sinks", 5, sinks=True),
    Merge("one part and sinks", 1, sinks=True),
    Merge("first saw nothing", 3, empty=(0,)),
    Merge("last saw nothing", 20, empty=(16, 17, 18, 19)),
    Merge("none saw anything", 18, empty=tuple(range(18))),
    Merge("nothing but sinks", 2, empty=(0, 1), sinks=True),
    Merge("far apart", 17, size=100.0),
]


def check_merge(case: Merge, device: torch.device) -> None:
    """Compare the kernel with the reference in float64, over parts that lie in a larger buffer."""
    from tierkv.kernels.triton_merge import merge

    generator = torch.Generator().manual_seed(1)
    shape = (case.parts, 2, 3, 4)
    outs = torch.randn(case.parts, 3, 3, 4, case.dim, generator=generator).to(device)[:, :2]
    lses = (case.size * torch.randn(case.parts, 3, 3, 4, generator=generator)).to(device)[:, 1:]
    sinks = torch.tensor([-1.0, 2.0, float("-inf"), 0.5]).to(device) if case.sinks else None
    assert outs.shape[:-1] == lses.shape == shape
    clean = outs.double()
    for part in case.empty:
        lses[part], outs[part], clean[part] = float("-inf"), float("nan"), 0
    parts = list(zip(clean, lses.double(), strict=True))
    expected = reference.merge(parts, None if sinks is None else sinks.double())
    got = merge(outs, lses, sinks)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=2e-6)


def check_pieces(device: torch.device, *, sinks: bool) -> None:
    """Attend to the runs of a row in two calls, merge, and compare with attention to all at once."""
    from tierkv.kernels.triton_attention import attention
    from tierkv.kernels.triton_merge import merge

    scenario = Scenario(Case("", rows=(150,), lengths=(32,), queries=3), device)
    runs, found = scenario.runs, []
    for chosen in (slice(0, None, 2), slice(1, None, 2)):
        table = runs.table[chosen].contiguous()
        piece = replace(runs, table=table, row_starts=torch.tensor([0, len(table)]).to(device), most_tokens=96)
        found.append(attention(scenario.query, piece, scenario.member, start=scenario.start, scale=0.125, splits=2))
    weights = torch.tensor([1.0, -2.0, 0.0, 4.0]).to(device) if sinks else None
    got = merge(torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found]), weights)
    expected = reference.merge([scenario.expected()], weights)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


COPIES = [
    Case("one new token in each of three rows", rows=(1, 1, 1)),
    Case("no token", rows=(0, 0)),
    Case("runs of 16, 3 and 40", rows=(150, 150), lengths=(16, 3, 40)),
    Case("long runs", rows=(300,), lengths=(256,), dtype=BFLOAT16),
    Case("rows of their own lengths", rows=(70, 0, 33), lengths=(48,), dtype=FLOAT16),
    Case("heads of 80 and 24", rows=(45,), key_dim=80, value_dim=24, dtype=BFLOAT16),
    Case("one number a key", rows=(9,), key_dim=1, value_dim=3),
]


def check_copies(case: Case, device: torch.device) -> None:
    """Append into pools that hold NaN, compare whole pools bit by bit, and gather it back."""
    from tierkv.kernels.triton_copy import append, gather

    want, have = Scenario(case, device), Scenario(case, device)
    for memory in have.runs.memory:
        memory.fill_(float("nan"))
    if case.rows[0]:
        want.keys[0, 0, 0, 0] = have.keys[0, 0, 0, 0] = float("nan")  # a NaN is copied like any other bits
        pool, segment, first, _, _ = want.spans[0][0]
        want.pools[pool][0][segment, want.member, 0, first, 0] = float("nan")
    # As a model hands them over: heads and tokens exchanged, in rows that are longer.
    keys, values = (
        torch.cat([dense, dense], -1)[..., : dense.shape[-1]].transpose(1, 2).contiguous().transpose(1, 2)
        for dense in (have.keys, have.values)
    )
    append(keys, values, have.runs, have.member)
    for memory, other in zip(have.runs.memory, want.runs.memory, strict=True):
        assert _bits(memory) == _bits(other)
    lead = (len(case.rows), max(case.rows), case.kv_heads)
    got_keys, got_values = (
        torch.full((*lead, dim), 7.0, dtype=case.dtype, device=device).transpose(1, 2)
        for dim in (case.key_dim, case.value_dim)
    )
    gather(have.runs, have.member, got_keys, got_values)
    assert _bits(got_keys) == _bits(have.keys)
    assert _bits(got_values) == _bits(have.values)


def check_blocks(dtype: torch.dtype, tokens: int, dim: int, device: torch.device) -> None:
    """Pack blocks of a pool that is a part of larger memory, and unpack them into another one."""
    from tierkv.kernels.triton_blocks import pack_blocks, unpack_blocks

    shape = (3, 4, 2, 4, tokens, dim)
    generator = torch.Generator().manual_seed(2)
    whole = torch.randint(0, 256, (*shape[:-1], dim * dtype.itemsize), dtype=torch.uint8, generator=generator)
    pool = whole.to(device).view(dtype)[:, 1:, :, :]
    slots = [9, 2, 3, 11, 0]
    staging = torch.zeros((5, 3, 2, tokens, dim), dtype=dtype, device=device)
    pack_blocks(pool, slots, staging)
    expected = torch.stack([pool[slot // 4, :, :, slot % 4] for slot in slots])
    assert _bits(staging) == _bits(expected)
    target = torch.zeros_like(whole.view(dtype)).to(device)[:, 1:]
    unpack_blocks(staging, slots, target)
    wanted = torch.zeros_like(pool)
    for slot in slots:
        wanted[slot // 4, :, :, slot % 4] = pool[slot // 4, :, :, slot % 4]
    assert _bits(target) == _bits(wanted)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
