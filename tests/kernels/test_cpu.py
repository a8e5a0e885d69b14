"""The CPU kernels against the reference: odd sizes, dtypes, ragged rows, and memory of tokens that nobody sees is NaN."""

import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.pools import scattered
from tierkv.kernels import cpu, reference
from tierkv.kernels.runs import Column

pytestmark = pytest.mark.skipif(bool(why := cpu.unsupported(torch.float32, 64, 64, 3)), reason=why)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
"""Of the float32 result, relative and absolute: whatever K and V are, scores and sums are float32."""


def check(lengths, *, group=3, queries=1, window=None, softcap=None, start=None, **how):
    """Compare both layers with the reference in float64."""
    pool = scattered(lengths, **how)
    runs = pool.runs
    start = pool.positions.shape[1] - queries if start is None else start
    generator = torch.Generator().manual_seed(7)
    shape = len(lengths), queries, runs.kv_heads * group, runs.key_dim
    query = torch.randn(shape, generator=generator).to(runs.dtype).transpose(1, 2)
    out = lse = query
    for member in range(runs.members):
        settings = {"start": start, "scale": runs.key_dim**-0.5, "window": window, "softcap": softcap}
        out, lse = cpu.attention(query, runs, member, **settings)
        wanted, wanted_lse = reference.attention(
            query.double(),
            pool.keys[member].double().nan_to_num(),
            pool.values[member].double(),
            pool.positions,
            **settings,
        )
        assert out.dtype == lse.dtype == torch.float32
        assert out.is_contiguous()
        tolerance = TOLERANCE[runs.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=tolerance, atol=tolerance)
    return out, lse


@pytest.mark.parametrize("dtype", cpu.ELEMENTS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 255, 700])
def test_one_query_over_one_row(dtype, length):
    check([length], dtype=dtype)


@pytest.mark.parametrize("dtype", cpu.ELEMENTS)
@pytest.mark.parametrize("queries", [1, 2, 5, 16, 33])
def test_ragged_rows_and_several_queries(dtype, queries):
    check([100, 37, 64, 33], queries=queries, dtype=dtype, start=70)


@pytest.mark.parametrize("dtype", cpu.ELEMENTS)
@pytest.mark.parametrize(
    ("group", "kv_heads", "key_dim", "value_dim"),
    [(1, 1, 32, 32), (1, 5, 64, 64), (2, 2, 80, 80), (4, 2, 96, 64), (7, 1, 128, 128), (8, 2, 112, 48), (16, 1, 64, 64),
     (3, 1, 256, 256), (5, 1, 33, 17), (1, 2, 4, 6), (64, 1, 64, 64)],
)  # fmt: skip
@pytest.mark.parametrize("queries", [1, 6])
def test_shapes_of_heads(dtype, group, kv_heads, key_dim, value_dim, queries):
    check(
        [150, 9], group=group, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, queries=queries, dtype=dtype
    )  # fmt: skip


@pytest.mark.parametrize("block", [16, 32, 128, 256])
def test_blocks_of_any_size_and_runs_that_begin_anywhere(block):
    for seed in range(4):
        check([500, 321], block=block, seed=seed)


@pytest.mark.parametrize("window", [1, 2, 17, 64, 1000])
@pytest.mark.parametrize("queries", [1, 9, 40])
def test_windows(window, queries):
    check([140, 140], window=window, queries=queries)


@pytest.mark.parametrize("queries", [1, 20])
def test_softcap(queries):
    check([200], softcap=3.0, queries=queries, scale=4.0)


def test_a_row_without_tokens_has_no_say():
    out, lse = check([0, 40, 0], queries=1, start=39)
    assert not out[0].any()
    assert lse[0].isneginf().all()


def test_no_row_has_tokens():
    out, lse = check([0, 0], queries=3)
    assert not out.any()
    assert lse.isneginf().all()


def test_queries_before_the_first_token_see_nothing():
    """Padding: the row's tokens begin behind the first queries."""
    out, lse = check([10, 20], first=[10, 0], queries=20, start=0)
    assert not out[0, :10].any()
    assert lse[0, :10].isneginf().all()


def test_a_long_context_is_split_and_combined():
    for dtype in cpu.ELEMENTS:
        check([5000], kv_heads=1, group=1, dtype=dtype, longest_run=16)


def test_scores_of_any_size_stay_finite():
    check([300], scale=200.0)
    check([300], scale=0.0)


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_against_float64_is_at_most_that_of_sdpa(dtype, spread):
    """The promise is 1.3 times; scores and sums in float32 do better than that."""
    pool = scattered([2000], dtype=dtype, scale=spread, longest_run=8)
    query = torch.randn((1, 6, 1, 64), generator=torch.Generator().manual_seed(1)).to(dtype)
    keys, values = pool.keys[0], pool.values[0]
    out, _ = cpu.attention(query, pool.runs, 0, start=1999, scale=0.125)
    exact, _ = reference.attention(
        query.double(), keys.double(), values.double(), pool.positions, start=1999, scale=0.125
    )
    stock = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True, scale=0.125)

    def error(result):
        return (result.double() - exact).square().mean().sqrt().item()

    assert error(out.to(dtype)) <= 1.3 * error(stock.transpose(1, 2))


def test_merged_parts_and_sinks_equal_attention_over_all():
    pool = scattered([300])
    query = torch.randn((1, 6, 1, 64), generator=torch.Generator().manual_seed(1))
    sinks = torch.tensor([0.0, 5.0, -5.0, 1.0, 2.0, 3.0])
    whole = reference.attention(query, pool.keys[0], pool.values[0], pool.positions, start=299, scale=0.125)
    parts = []
    for begin, end in ((0, 100), (100, 101), (101, 300), (0, 0)):
        positions = pool.positions.clone()
        positions[:, :begin] = positions[:, end:] = -1
        parts.append(reference.attention(query, pool.keys[0], pool.values[0], positions, start=299, scale=0.125))
    torch.testing.assert_close(reference.merge(parts), reference.merge([whole]), rtol=1e-5, atol=1e-6)
    out, lse = reference.merge(parts, sinks)
    scores = torch.einsum("rhgqd,rhtd->rhgqt", query.view(1, 2, 3, 1, 64), pool.keys[0]) * 0.125
    with_sink = torch.cat([scores, sinks.view(1, 2, 3, 1, 1)], -1).softmax(-1)[..., :-1]
    wanted = torch.einsum("rhgqt,rhtd->rhgqd", with_sink, pool.values[0]).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    assert (lse > whole[1]).all()


# -- append -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cpu.ELEMENTS)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_append_writes_the_named_tokens_and_nothing_else(dtype, tokens):
    pool = scattered([tokens, tokens], dtype=dtype, key_dim=24, value_dim=40)
    before = [memory.clone() for memory in pool.runs.memory]
    for memory in pool.runs.memory:
        memory.fill_(float("nan"))
    for member in range(2):
        keys = pool.keys[member].transpose(1, 2).contiguous().transpose(1, 2)  # as a model hands them over: strided
        cpu.append(keys, pool.values[member], pool.runs, member)
    for memory, wanted in zip(pool.runs.memory, before, strict=True):
        assert torch.equal(memory.isnan(), wanted.isnan())
        assert torch.equal(memory.nan_to_num(), wanted.nan_to_num())


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.double(), "takes dense torch.float32"),
        (lambda q: q[:, :5], "does not fit"),
        (lambda q: q[..., :32].contiguous(), "does not fit"),
        (lambda q: q[:, :, :0], "does not fit"),
        (lambda q: q.expand(3, -1, -1, -1), "does not fit"),
        (lambda q: torch.stack([q, q], -1)[..., 0], "of strides"),
    ],
    ids=["dtype", "heads", "dim", "no queries", "rows", "strides"],
)
def test_a_query_that_does_not_fit_is_refused_before_anything_runs(change, message):
    pool = scattered([40])
    with pytest.raises(ValueError, match=message):
        cpu.attention(change(torch.zeros(1, 6, 1, 64)), pool.runs, 0, start=39, scale=1.0)


@pytest.mark.parametrize("member", [-1, 2])
def test_a_layer_outside_the_group_is_refused(member):
    pool = scattered([40])
    with pytest.raises(ValueError, match="is not one of the 2"):
        cpu.attention(torch.zeros(1, 6, 1, 64), pool.runs, member, start=39, scale=1.0)


def test_new_tokens_that_do_not_fit_are_refused():
    pool = scattered([40])
    with pytest.raises(ValueError, match="do not fit"):
        cpu.append(torch.zeros(1, 2, 39, 64), torch.zeros(1, 2, 39, 64), pool.runs, 0)
    with pytest.raises(ValueError, match="do not fit"):
        cpu.append(torch.zeros(1, 2, 40, 64), torch.zeros(1, 2, 40, 32), pool.runs, 0)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (torch.float64, (64, 64, 1), "no CPU kernel for float64"),
        (torch.float32, (0, 64, 1), "no CPU kernel for heads of 0"),
        (torch.float32, (64, 1000, 1), "no CPU kernel for heads of 64 and 1000"),
        (torch.float32, (64, 64, 1000), "in groups of 1000"),
    ],
)
def test_shapes_without_a_kernel_are_named(dtype, shape, message):
    assert message in cpu.unsupported(dtype, *shape)


def in_fresh_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", "import torch\nfrom tierkv.kernels import cpu\n" + code],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_without_a_compiler_the_reason_is_one_line(tmp_path):
    ask = "print(cpu.unsupported(torch.float32, 64, 64, 2))"
    folder = {"TIERKV_CACHE_DIR": str(tmp_path)}
    assert in_fresh_process(ask, CXX="no-such-compiler", **folder) == (
        "there is no C++ compiler (no-such-compiler); install one, or name it in CXX"
    )
    assert in_fresh_process(ask, CXX="false", **folder).startswith("false cannot compile the CPU kernel")
    assert in_fresh_process(ask, CXX="c++ -fno-such-flag", **folder).startswith("c++ cannot compile the CPU kernel")
    file = tmp_path / "file"
    file.write_text("")
    assert in_fresh_process(ask, TIERKV_CACHE_DIR=str(file)).startswith("the compiled kernel cannot be kept or loaded")


@pytest.mark.slow
def test_a_kernel_is_compiled_once_and_found_again_unless_it_is_damaged(tmp_path):
    ask = "print(cpu.unsupported(torch.float32, 64, 64, 2))"
    folder = {"TIERKV_CACHE_DIR": str(tmp_path)}
    assert in_fresh_process(ask, **folder) == ""
    assert len(list((tmp_path / "kernels").iterdir())) == 4  # attention's group, append's, and what they should be
    assert in_fresh_process(ask, CXX="no-such-compiler", **folder) == ""  # there is no need of one any more
    for size in (0, 200, 9000):  # a power loss cut them off
        for kernel in (tmp_path / "kernels").glob("*.so"):
            kernel.write_bytes(kernel.read_bytes()[:size])
        assert in_fresh_process(ask, **folder) == ""


def test_the_table_has_the_columns_that_the_kernel_reads():
    source = cpu.SOURCE.read_text(encoding="utf-8")
    assert f"int64_t {', '.join(column.name.lower().removesuffix('_stride') for column in Column)};" in source
