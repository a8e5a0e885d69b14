"""Bandwidths: what an engine measures of its machine when it opens, in some milliseconds, on its own empty pools.

Only where host memory is streamed, so never on a CPU, and for ``tierkv.cold_reads``. The first engine of a model on a machine
also compiles the CPU's kernel for its heads, about a second each, which is kept.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierkv.block_table import Extent
from tierkv.cold_reads import ColdReads
from tierkv.cost import Costs, Line
from tierkv.errors import TierKVError
from tierkv.layout import BlockLayout
from tierkv.run_tables import runs_in_pools
from tierkv.tier import Run, Tier, Wire
from tierkv.transfer import Copy, TransferEngine

if TYPE_CHECKING:
    import torch

    from tierkv.stores import Stores

log = logging.getLogger(__name__)

_UP: Final = Wire(Tier.HOST, Tier.DEVICE)
_SAMPLE_BYTES: Final = 256 << 20
"""That are read to measure a bandwidth, where the pool has so many: less would come from a cache."""
_ROUNDS: Final = 3
_OPERATIONS_OF_A_LAYER: Final = 40
"""That PyTorch launches one by one for a decoder layer of the Llama family: norms, projections, rotations, the MLP."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What tells, beside the shape of its KV, how long a model computes.

    Attributes:
        query_heads: of a layer.
        weight_bytes: of all parameters. A forward reads fewer where a mixture of experts is in them: then more copies are
            taken to hide behind computing than really do.
    """

    query_heads: int
    weight_bytes: int


def cold_reads_of(
    stores: "Stores", transfers: TransferEngine, cold_read: str, facts: ModelFacts | None, *, gathered: bool
) -> ColdReads:
    """Return the choices of an engine that has just been opened. Overwrites its pools, which must be empty.

    Args:
        stores: of the engine.
        transfers: its executor.
        cold_read: ``attention.cold_read``.
        facts: of the model, or None where nobody knows them.
        gathered: whether layers are gathered whole, so that all of them are streamed.
    """
    host_is_read = stores.host_is_read(cold_read)
    may_choose = cold_read == "auto" and not gathered
    costs = None
    if facts and stores.host and host_is_read == "streamed":
        try:
            costs = measure(stores, transfers, facts, cpu_too=may_choose)
        except (TierKVError, RuntimeError) as error:  # the second is how PyTorch reports whatever a GPU refuses
            log.warning("the bandwidths of this machine cannot be measured, so host memory is streamed: %s", error)
    return ColdReads(host_is_read, stores.layout, costs)


def measure(stores: "Stores", transfers: TransferEngine, facts: ModelFacts, *, cpu_too: bool = True) -> Costs:
    """Return the costs of a model on this machine, as far as the choice needs them.

    Overwrites slots of both pools. Of each figure the best of three rounds: what disturbs makes it slower, never faster.
    ``step_seconds`` is what reading the weights takes, or launching a layer's operations where that is longer.

    Args:
        stores: with a host pool.
        transfers: that copies between the pools.
        facts: of the model.
        cpu_too: also measure attention by the CPU, if it can attend to such heads.

    Raises:
        TierKVError: a copy failed.
        RuntimeError: the device failed.
    """
    device_rate = _device_rate(stores)
    rates = {Tier.DEVICE: device_rate}
    wire = _wire(stores, transfers)
    hop_seconds = 0.0
    if cpu_too and _cpu_can_attend(stores.layout, facts):
        there = _attention_by_cpu(stores, facts)
        rates[Tier.HOST] = there.bytes_per_second
        hop_seconds = there.latency_seconds + _hop(stores, facts)
    # Weights are read while the next operations are launched: what is longer counts.
    launches = _launch(stores) * _OPERATIONS_OF_A_LAYER * len(stores.layout.layers)
    step_seconds = max(facts.weight_bytes / device_rate, launches)
    return Costs(step_seconds=step_seconds, kv_bytes_per_second=rates, wires={_UP: wire}, hop_seconds=hop_seconds)


def _device_rate(stores: "Stores") -> float:
    """Return at how many bytes a second the device reads its memory: half of what a copy there moves is read."""
    flat = stores.device.memory(0)[0]
    half = min(flat.numel() // 2, _SAMPLE_BYTES // flat.element_size())
    source, destination = flat[:half], flat[half : 2 * half]
    repeats = max(1, _SAMPLE_BYTES // source.nbytes)

    def copy() -> None:
        for _ in range(repeats):
            destination.copy_(source)

    return 2 * repeats * source.nbytes / _best(copy, stores.device.device)


def _launch(stores: "Stores") -> float:
    """Return the seconds that PyTorch takes to launch one operation."""
    import torch

    device = stores.device.device
    number, repeats = torch.zeros(1, device=device), 100

    def launch() -> None:
        for _ in range(repeats):
            number.add_(1)

    return _best(launch, device) / repeats


def _wire(stores: "Stores", transfers: TransferEngine) -> Line:
    """Return what copies to the device cost, from those of a block's slice and of a whole run's."""
    host, device = stores.slab(Tier.HOST), stores.device
    size = stores.layout.block_size

    def seconds(slots: int) -> tuple[int, float]:
        run, tokens = Run(0, slots), slots * size
        pairs = list(zip(device.views(0, run, 0, tokens), host.views(0, run, 0, tokens), strict=True))
        num_bytes = sum(source.nbytes for _, source in pairs)
        copies = [Copy(_UP, num_bytes, pairs)] * max(1, min(64, _SAMPLE_BYTES // num_bytes))
        return num_bytes, _best(lambda: transfers.wait(transfers.submit(copies)), device.device) / len(copies)

    longest = min(host.slots_per_segment, device.slots_per_segment)
    return _line(seconds(1), seconds(longest), 2)  # two pieces: K and V


def _line(short: tuple[int, float], long: tuple[int, float], pieces: int) -> Line:
    """Return the line through two measurements of ``(bytes, seconds)``, each of so many pieces."""
    (few, quick), (many, slow) = short, long
    if many == few or slow <= quick:
        return Line(0.0, many / slow)
    rate = (many - few) / (slow - quick)
    return Line(max(0.0, (quick - few / rate) / pieces), rate)


def _cpu_can_attend(layout: BlockLayout, facts: ModelFacts) -> bool:
    import torch

    from tierkv.kernels import dispatch

    dtype = getattr(torch, layout.dtype)
    return not any(
        dispatch.unsupported(
            torch.device("cpu"), dtype, spec.key_dim, spec.value_dim, facts.query_heads // spec.kv_heads
        )
        for spec in layout.groups
    )


def _attention_by_cpu(stores: "Stores", facts: ModelFacts) -> Line:
    """Return what attention of one new token costs where the bytes lie, in host memory; a piece is a layer."""
    import torch

    from tierkv.kernels import dispatch

    host, layout = stores.slab(Tier.HOST), stores.layout
    spec = layout.groups[0]
    query = torch.ones((1, facts.query_heads, 1, spec.key_dim), dtype=getattr(torch, layout.dtype), device="cpu")

    def seconds(slots: int) -> tuple[int, float]:
        extents, num_bytes = [], 0
        for slot in range(0, slots, host.slots_per_segment):
            run = Run(slot, min(host.slots_per_segment, slots - slot))
            start, tokens = slot * layout.block_size, run.length * layout.block_size
            extents.append(Extent(Tier.HOST, run, 0, start, start + tokens))
            for layer in spec.members:
                for view in host.views(layer, run, 0, tokens):
                    view.fill_(0.5)  # what memory was handed out with may be numbers that take far longer to multiply
                    num_bytes += view.nbytes
        runs = runs_in_pools(stores, 0, [extents], on_cpu=True)

        def attend() -> None:
            for member in range(len(spec.members)):
                dispatch.attention(query, runs, member, start=slots * layout.block_size, scale=1.0)

        return num_bytes, _best(attend, torch.device("cpu"))

    first = seconds(1)
    most = max(1, min(stores.slots[Tier.HOST], _SAMPLE_BYTES // first[0]))
    return _line(first, seconds(most), len(spec.members))


def _hop(stores: "Stores", facts: ModelFacts) -> float:
    """Return the seconds to send one layer's query to the CPU and bring its partial result back."""
    import torch

    device, spec = stores.device.device, stores.layout.groups[0]
    query = torch.zeros(
        (1, facts.query_heads, 1, spec.key_dim), dtype=getattr(torch, stores.layout.dtype), device=device
    )
    out = torch.zeros((1, 1, facts.query_heads, spec.value_dim), device="cpu")
    lse = torch.zeros((1, 1, facts.query_heads), device="cpu")
    repeats = 10

    def hop() -> None:
        for _ in range(repeats):
            query.cpu()
            out.to(device)
            lse.to(device)

    return _best(hop, device) / repeats


def _best(work: Callable[[], object], device: "torch.device") -> float:
    """Return the seconds that work takes in the best of some rounds, after one that counts for nothing."""
    work()
    found = []
    for _ in range(_ROUNDS):
        _finish(device)
        began = time.perf_counter()
        work()
        _finish(device)
        found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)


def _finish(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
