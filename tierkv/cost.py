"""Cost model: how long a decoded token, a prefill and a restore take, from a few parameters, each with its unit.

    decode     one forward, KV read where it lies, and the copies that computing does not hide
    prefill    tokens through the weights, and attention between pairs of tokens
    restore    blocks and bytes of a prefix, from the tier where they lie

A roofline for each part and a bound on how far copies overlap with computing; exact attention reads all KV at every
token. ``tierkv.hardware`` makes the parameters from published figures, ``tierkv.fit`` from measurements.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from tierkv.tier import Tier, Wire

Read = Literal["stream", "compute"]
"""How cold KV is read: copied to the device at each token, or attended by the CPU where it lies."""

PIECE_BYTES: Final = 1 << 20
"""Bytes of one layer that are copied in one go: a segment's K or V, at most."""
_TO_DEVICE: Final = Wire(Tier.HOST, Tier.DEVICE)


@dataclass(frozen=True, slots=True)
class Line:
    """What a copy costs: ``pieces * latency_seconds + bytes / bytes_per_second``."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float, pieces: float = 1) -> float:
        """Return the seconds that so many bytes take in so many pieces."""
        return pieces * self.latency_seconds + num_bytes / self.bytes_per_second if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class WeightReads:
    """What reading the weights costs apart from the rest of a forward: more tokens reach more of the experts.

    Attributes:
        launch_seconds: of a forward, whatever it reads and computes.
        dense_seconds: to read what every token is multiplied with.
        expert_seconds: to read all routed experts.
        missed: share of the experts that one token leaves out.
    """

    launch_seconds: float
    dense_seconds: float
    expert_seconds: float = 0.0
    missed: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Return the seconds to read what so many tokens of one forward are multiplied with."""
        return self.dense_seconds + self.expert_seconds * (1 - self.missed**tokens)


@dataclass(frozen=True, slots=True)
class WindowPairs:
    """What attention costs in a prefill in all layers with one window.

    Attributes:
        tokens: of the window.
        pair_seconds: attention of one token to one that it sees, all these layers.
        chunked: whether windows lie side by side, so that a token sees only its own chunk.
    """

    tokens: int
    pair_seconds: float
    chunked: bool = False

    def pairs(self, tokens: int, past: int) -> float:
        """Return how many pairs of tokens attend when ``tokens`` are computed behind ``past`` others."""
        return self._until(past + tokens) - self._until(past)

    def _until(self, tokens: int) -> float:
        if self.chunked:
            chunks, rest = divmod(tokens, self.tokens)
            return chunks * self.tokens**2 / 2 + rest**2 / 2
        growing = min(tokens, self.tokens)
        return growing**2 / 2 + (tokens - growing) * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The parameters of one model on one machine.

    Attributes:
        step_seconds: a forward of one token and one row that reads no KV: weights, launches and Python.
        row_seconds: what each further row adds to it.
        kv_bytes_per_second: per tier, at what rate attention reads KV where it lies. The device has one; host memory has
            one where the CPU can attend; the disk never has.
        wires: what copies cost, by direction. Those that a machine has not are absent.
        overlap: share of the computing time behind which copies can hide, 0 to 1.
        hop_seconds: per layer, to send a query to the CPU and bring its partial result back.
        token_seconds: prefill, one token through the weights.
        pair_seconds: prefill, attention of one token to one before it, all layers without a window of their own below.
        past_pair_seconds: the same where the one before lies in the cache already; None: as ``pair_seconds``.
        restore_seconds: one restore, before its first byte.
        block_seconds: one restored block, besides moving its bytes.
        stored_bytes_per_second: at what rate the prefix store's records come from a disk that has to be read for them;
            None where there is no store.
        weights: what of ``step_seconds`` reads weights, or None where only their sum was measured.
        windows: prefill, attention in layers with a window; none where a measured ``token_seconds`` holds them.
    """

    step_seconds: float
    row_seconds: float = 0.0
    kv_bytes_per_second: Mapping[Tier, float]
    wires: Mapping[Wire, Line] = field(default_factory=dict)
    overlap: float = 1.0
    hop_seconds: float = 0.0
    token_seconds: float = 0.0
    pair_seconds: float = 0.0
    past_pair_seconds: float | None = None
    restore_seconds: float = 0.0
    block_seconds: float = 0.0
    stored_bytes_per_second: float | None = None
    weights: WeightReads | None = None
    windows: tuple[WindowPairs, ...] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time and what it is made of.

    Attributes:
        terms: seconds by what they are spent on; what is hidden behind something else is not in it.
    """

    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """All terms together."""
        return sum(self.terms.values())

    @property
    def bottleneck(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True, slots=True)
class CostModel:
    """Answers for one model on one machine.

    Attributes:
        costs: the parameters.
        layers: that keep KV.
        block_bytes: KV of one block, all layers.
        block_size: tokens in a block.
    """

    costs: Costs
    layers: int
    block_bytes: int
    block_size: int

    def decode(self, kv_bytes: Mapping[Tier, float], *, rows: int = 1, read: Read = "stream") -> Estimate:
        """Return the time of one decoded token of every row.

        Args:
            kv_bytes: that all rows together read, by the tier where they lie.
            rows: sequences.
            read: how those in host memory are read; those on disk are always copied.

        Raises:
            ValueError: the machine cannot read them so.
        """
        costs, host = self.costs, kv_bytes.get(Tier.HOST, 0.0)
        terms = {
            "weights and launches": costs.step_seconds + costs.row_seconds * (rows - 1),
            "attention on the device": kv_bytes.get(Tier.DEVICE, 0.0) / costs.kv_bytes_per_second[Tier.DEVICE],
        }
        copied = {Tier.DISK: kv_bytes.get(Tier.DISK, 0.0), Tier.HOST: 0.0}
        if host and read == "compute":
            if Tier.HOST not in costs.kv_bytes_per_second:
                raise ValueError("attention where host memory lies has no measured rate here; read it with stream")
            # While the CPU attends, the device works on its part: what is longer counts.
            there = host / costs.kv_bytes_per_second[Tier.HOST] + self.layers * costs.hop_seconds
            terms["attention in host memory"] = max(0.0, there - costs.overlap * terms["attention on the device"])
        elif host:
            copied[Tier.HOST] = host
        # What is copied is read on the device, too.
        terms["attention on the device"] += sum(copied.values()) / costs.kv_bytes_per_second[Tier.DEVICE]
        hidden = costs.overlap * sum(terms.values())
        for tier, num_bytes in copied.items():
            if num_bytes:
                seconds = self._up(tier, num_bytes)
                # Before the first layer's copy there is nothing to hide it behind.
                terms[f"copies from {tier.label}"] = max(seconds - hidden, seconds / self.layers)
                hidden = max(0.0, hidden - seconds)
        return Estimate(terms)

    def prefill(self, tokens: int, past: int = 0, *, rows: int = 1) -> Estimate:
        """Return the time to compute ``tokens`` behind ``past`` others, and so to the first token of an answer.

        Args:
            tokens: of every row.
            past: of every row, before them.
            rows: sequences in the one forward.
        """
        costs = self.costs
        behind = costs.pair_seconds if costs.past_pair_seconds is None else costs.past_pair_seconds
        attention = tokens * (past * behind + tokens / 2 * costs.pair_seconds)
        attention += sum(one.pair_seconds * one.pairs(tokens, past) for one in costs.windows)
        arithmetic = rows * tokens * costs.token_seconds
        if costs.weights is None:
            terms = {"weights and launches": costs.step_seconds, "arithmetic": arithmetic}
        else:
            # Weights are read while others are multiplied: what is longer counts.
            read = costs.weights.seconds(rows * tokens)
            terms = {"launches": costs.weights.launch_seconds}
            terms |= {"reading weights": read} if read > arithmetic else {"arithmetic": arithmetic}
        return Estimate({**terms, "attention": rows * attention})

    def restore(self, tokens: int, source: Tier) -> Estimate:
        """Return the time to bring a prefix of whole blocks to the device.

        Args:
            tokens: of the prefix.
            source: where it lies: on disk that is the prefix store. What lies on the device is only shared.

        Raises:
            ValueError: the machine has no such tier.
        """
        blocks = tokens // self.block_size
        num_bytes = blocks * self.block_bytes
        terms = {"finding it": self.costs.restore_seconds, "blocks": blocks * self.costs.block_seconds}
        if source is Tier.DISK:
            if self.costs.stored_bytes_per_second is None:
                raise ValueError("no prefix store was measured here")
            from_disk = num_bytes / self.costs.stored_bytes_per_second
            through_host = _TO_DEVICE in self.costs.wires and Wire(Tier.DISK, Tier.DEVICE) not in self.costs.wires
            last = self._up(Tier.HOST, num_bytes) if through_host else 0.0
            # One block after another: while one is copied to the device, the next is read.
            terms |= {"copies from host": last} if last > from_disk else {"reading the disk": from_disk}
        elif source is Tier.HOST:
            terms["copies from host"] = self._up(source, num_bytes)
        return Estimate(terms)

    def move(self, wire: Wire, blocks: int) -> float:
        """Return the seconds that blocks take on a wire, all layers of each, one after another.

        Raises:
            ValueError: the machine has no such wire.
        """
        if wire not in self.costs.wires:
            known = ", ".join(one.label for one in self.costs.wires) or "none"
            raise ValueError(f"nothing moves {wire.label} here; the costs of these are known: {known}")
        num_bytes = blocks * self.block_bytes
        return self.costs.wires[wire].seconds(num_bytes, self._pieces(wire, num_bytes))

    def _up(self, source: Tier, num_bytes: float) -> float:
        """Return the seconds that bytes take from ``source`` to the device: past host memory, if there is no wire."""
        direct = Wire(source, Tier.DEVICE)
        hops = [direct] if direct in self.costs.wires else [Wire(Tier.DISK, Tier.HOST), Wire(Tier.HOST, Tier.DEVICE)]
        if any(hop not in self.costs.wires for hop in hops):
            raise ValueError(f"nothing moves {direct.label} here")
        # One piece after another: while one is on the second wire, the next is on the first.
        return max(self.costs.wires[hop].seconds(num_bytes, self._pieces(hop, num_bytes)) for hop in hops)

    def _pieces(self, wire: Wire, num_bytes: float) -> float:
        """Return in how many pieces bytes of all layers are copied: records of a slice, or runs of a layer's K or V."""
        if Tier.DISK in wire:
            return num_bytes * self.layers / self.block_bytes
        return 2 * self.layers * max(1.0, num_bytes / (2 * self.layers) / PIECE_BYTES)
