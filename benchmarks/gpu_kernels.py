"""Sections of ``gpu_check`` about attention over blocks: is it right, and how fast does it read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from tierkv.benchmarks.gpu_common import Layer, Record, Timer, filled, plain_layout, rounds
from tierkv.kernels import reference

LAYERS: Final = 2
TOLERANCE: Final = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest difference from float64, relative to the largest output; results are rounded to the dtype."""


@dataclass(frozen=True)
class Shape:
    """What to attend to. The last ``queries`` of the ``tokens`` ask."""

    name: str
    rows: int
    query_heads: int
    kv_heads: int
    dim: int
    tokens: int
    queries: int = 1
    window: int | None = None
    softcap: float | None = None


SHAPES: Final = (
    Shape("decode", 1, 32, 8, 128, 8192),
    Shape("decode of four rows", 4, 32, 8, 128, 3001),
    Shape("decode, 9 heads of 64", 1, 9, 3, 64, 2000),
    Shape("prefill behind a prefix", 1, 32, 8, 128, 3000, queries=1000),
    Shape("prefill, window, softcap, heads of 256", 1, 8, 4, 256, 1500, queries=500, window=700, softcap=30.0),
)
SMALL_SHAPES: Final = (
    Shape("decode", 2, 8, 2, 32, 601),
    Shape("prefill behind a prefix", 1, 8, 2, 32, 400, queries=90, window=200, softcap=30.0),
)
READS: Final = {"in place": 1.0, "stream": 0.3, "compute": 0.3, "gathered": 0.3}
"""Ways to read, and the share of the tokens that then lies on the device."""


def check_attention(record: Record) -> None:
    """Compare attention through an engine with the reference in float64, for shapes, dtypes and ways to read."""
    results: list[dict[str, Any]] = []
    for dtype, read, shape in _cases(SMALL_SHAPES if record.rehearse else SHAPES):
        if record.seconds_left() < 3:
            record.put(left_out_for_time=True)
            break
        with record.part(f"{shape.name}, {dtype}, {read}"):
            check = _gathered if read == "gathered" else _attended
            found = check(record, shape, dtype, read)
            results.append({"shape": shape.name, "dtype": dtype, "read": read, **found})
            record.put(cases=results, cases_run=len(results), cases_passed=sum(one["passed"] for one in results))
    off = [f"{one['shape']}, {one['dtype']}, {one['read']}: wrong" for one in results if not one["passed"]]
    record.put(all_passed=not off and not record.figures.get("errors"))
    if off:
        record.put(errors=[*record.figures.get("errors", []), *off])


def _cases(shapes: Sequence[Shape]) -> Iterator[tuple[str, str, Shape]]:
    """Yield dtype, way to read and shape; what is used most comes first, for a machine that has no time for all."""
    for dtype in ("bfloat16", "float32", "float16"):
        for read in READS if dtype != "float16" else ("in place",):
            for shape in shapes:
                if read == "in place" or shape.rows * shape.queries > 1:
                    yield dtype, read, shape


def _attended(record: Record, shape: Shape, dtype: str, read: str) -> dict[str, Any]:
    contents = [_content(record.device, shape, dtype, layer) for layer in range(LAYERS)]
    layout = plain_layout(LAYERS, shape.kv_heads, shape.dim, dtype, shape.window)
    past = shape.tokens - shape.queries
    generator = torch.Generator(record.device).manual_seed(99)
    # As models hand it over: heads and tokens exchanged.
    query = (
        torch.randn(
            (shape.rows, shape.queries, shape.query_heads, shape.dim), generator=generator, device=record.device
        )
        .to(getattr(torch, dtype))
        .transpose(1, 2)
    )
    how = {"scale": shape.dim**-0.5, "softcap": shape.softcap}
    worst = stock_worst = 0.0
    before = [(keys[:, :, :past], values[:, :, :past]) for keys, values in contents]
    cold_read = "stream" if read == "in place" else read
    with filled(layout, record.device, before, device_share=READS[read], cold_read=cold_read) as (engine, batch):
        below = engine.stats().tiers["host"].blocks
        for layer, (keys, values) in enumerate(contents):
            batch.append_paged(layer, keys[:, :, past:], values[:, :, past:])
            out = batch.attend(layer, query, **how)  # type: ignore[arg-type]
            expected, scale = _expected(shape, query, keys, values)
            worst = max(worst, float((out.double() - expected).abs().max()) / scale)
            if shape.softcap is None:
                stock = scaled_dot_product_attention(query, keys, values, _mask(shape, keys.device), enable_gqa=True)
                stock_worst = max(stock_worst, float((stock.transpose(1, 2).double() - expected).abs().max()) / scale)
    found: dict[str, Any] = {
        "blocks_in_host_memory": below,
        "largest_error_relative_to_largest_output": worst,
        "tolerance_relative_to_largest_output": TOLERANCE[dtype],
        "passed": worst <= TOLERANCE[dtype],
    }
    if shape.softcap is None:
        found["stock_attention_largest_error_relative_to_largest_output"] = stock_worst
    return found


def _gathered(record: Record, shape: Shape, dtype: str, read: str) -> dict[str, Any]:
    """Whole layers must come back bit by bit."""
    contents = [_content(record.device, shape, dtype, layer) for layer in range(LAYERS)]
    layout = plain_layout(LAYERS, shape.kv_heads, shape.dim, dtype)
    past = shape.tokens - shape.queries
    before = [(keys[:, :, :past], values[:, :, :past]) for keys, values in contents]
    passed = True
    with filled(layout, record.device, before, device_share=READS[read], gathered=True) as (engine, batch):
        below = engine.stats().tiers["host"].blocks
        for layer, (keys, values) in enumerate(contents):
            got = batch.append(layer, keys[:, :, past:], values[:, :, past:])
            passed = passed and torch.equal(got[0], keys) and torch.equal(got[1], values)
    return {"blocks_in_host_memory": below, "passed": passed}


def _content(device: torch.device, shape: Shape, dtype: str, seed: int) -> Layer:
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.rows, shape.tokens, shape.kv_heads, shape.dim)
    keys, values = (torch.randn(size, generator=generator, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return keys.transpose(1, 2), values.transpose(1, 2)


def _expected(
    shape: Shape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, float]:
    positions = torch.arange(shape.tokens, device=query.device).expand(shape.rows, -1)
    expected, _ = reference.attention(
        query.double(), keys.double(), values.double(), positions,
        start=shape.tokens - shape.queries, scale=shape.dim**-0.5, window=shape.window, softcap=shape.softcap,
    )  # fmt: skip
    return expected, float(expected.abs().max())


def _mask(shape: Shape, device: torch.device) -> torch.Tensor:
    positions = torch.arange(shape.tokens, device=device)
    own = positions[shape.tokens - shape.queries :, None]
    seen = positions <= own
    return seen if shape.window is None else seen & (positions > own - shape.window)


def measure_bandwidth(record: Record) -> None:
    """Time one layer's decode attention with all KV on the device, beside a device-to-device copy in the same rounds."""
    contexts = (256, 1024) if record.rehearse else (8192, 32768, 131072)
    repeats = 3 if record.rehearse else 20
    query_heads, kv_heads, dim = (8, 2, 32) if record.rehearse else (32, 8, 128)
    source = torch.ones(2**22 if record.rehearse else 2**31, dtype=torch.uint8, device=record.device)
    destination = torch.empty_like(source)
    record.put(
        dtype="bfloat16", query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, repeats=repeats,
        copy_counts="bytes read and bytes written", contexts=[],
    )  # fmt: skip
    timer = Timer(record.device)
    for context in contexts:
        with record.part(f"{context:,} tokens"):
            shape = Shape("", 1, query_heads, kv_heads, dim, context)
            found = _bandwidth(record, timer, shape, repeats, lambda: destination.copy_(source), 2 * source.nbytes)
            record.put(contexts=[*record.figures["contexts"], found])


def _bandwidth(
    record: Record, timer: Timer, shape: Shape, repeats: int, copy: Callable[[], object], copy_bytes: int
) -> dict[str, Any]:
    kv_bytes = 2 * shape.tokens * shape.kv_heads * shape.dim * 2
    layers = min(16, max(3, 2**30 // kv_bytes))  # together more than the chip's caches hold
    contents = [_content(record.device, shape, "bfloat16", layer) for layer in range(layers)]
    contents = [(keys.contiguous(), values.contiguous()) for keys, values in contents]
    query = torch.randn(1, shape.query_heads, 1, shape.dim, device=record.device).bfloat16()
    layout = plain_layout(layers, shape.kv_heads, shape.dim, "bfloat16")
    found: dict[str, Any] = {"context_tokens": shape.tokens, "layers_in_turn": layers, "kv_bytes_per_layer": kv_bytes}
    with filled(layout, record.device, contents) as (engine, batch):
        new = contents[0][0][:, :, :1], contents[0][1][:, :, :1]
        batch.append_paged(0, *new)
        for layer in range(1, layers):
            engine.paged.append(layer, *new)

        def ours() -> None:
            for layer in range(layers):
                engine.paged.attend(layer, query, *new, scale=shape.dim**-0.5)

        def stock() -> None:
            for keys, values in contents:
                scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        ways = {"tierkv_launched_from_python": ours, "stock_launched_from_python": stock}
        if timer.cuda:
            for name, work in (("tierkv", ours), ("stock", stock)):
                with record.part(f"graph of {name}"):
                    ways[f"{name}_in_a_graph"] = _graph(work).replay
        works: dict[str, Callable[[], float]] = {"copy": lambda: timer.device_seconds(copy)}
        works |= {name: lambda work=work: timer.device_seconds(work) for name, work in ways.items()}
        times = rounds(works, repeats)
    copied = copy_bytes / sorted(times.pop("copy"))[repeats // 2]
    found["device_copy_bytes_per_second"] = copied
    for name, seconds in times.items():
        middle = sorted(seconds)[repeats // 2] / layers
        found[name] = {
            "median_seconds_per_layer": middle,
            "min_seconds_per_layer": min(seconds) / layers,
            "all_seconds_per_layer": [one / layers for one in seconds],
            "kv_bytes_per_second": kv_bytes / middle,
            "share_of_device_copy_ratio": kv_bytes / middle / copied,
        }
    return found


def _graph(work: Callable[[], None]) -> "torch.cuda.CUDAGraph":
    """Record launches to replay them without Python between them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
