"""The section of ``gpu_check`` about decoding: a random Llama of 8B's shapes over stock caches and over tierkv.

As in ``decode``, the past is synthetic, every cache is filled before any is timed, the logits are compared with those of
``DynamicCache`` first, and the caches take turns.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from transformers import DynamicCache

from tierkv.benchmarks.decode import TOLERANCE, WARM_UP
from tierkv.benchmarks.gpu_caches import CACHES, KEY_SIZE, Past, Subject, llama
from tierkv.benchmarks.gpu_common import Record, Timer, Watch, one_line
from tierkv.errors import TierKVError

ROUNDS: Final = 9
WATCHED: Final = 2


def measure_decode(record: Record) -> None:
    """Measure both contexts; each may take half of the time that is left."""
    contexts = ((1500, 3), (2000, 3)) if record.rehearse else ((32768, 16), (131072, 8))
    record.put(
        model="random weights, shapes of Llama-3.1-8B with fewer layers" if not record.rehearse else "tiny, random",
        past=f"synthetic: random K (times {KEY_SIZE}) and V, put in without a prefill",
        dtype="bfloat16", layers_of_the_full_model=32, batch_rows=1, warm_up_steps=WARM_UP, most_rounds=ROUNDS,
        clock="of the wall, device idle at both ends of a step; all caches in turn",
        logit_tolerance_relative_to_largest_logit=TOLERANCE["bfloat16"],
    )  # fmt: skip
    for at, (context, layers) in enumerate(contexts):
        with record.part(f"{context:,} tokens"):
            deadline = time.monotonic() + record.seconds_left() / (len(contexts) - at) - 3
            names = [name for name in CACHES if at == 0 or "gathered" not in name]
            _Context(record, context, layers, deadline).measure(names)
        if record.device.type == "cuda":
            torch.cuda.empty_cache()


class _Context:
    """One context length, from the model to the rows."""

    def __init__(self, record: Record, context: int, layers: int, deadline: float) -> None:
        self.record, self.context, self.deadline = record, context, deadline
        self.timer = Timer(record.device)
        self.subjects: list[Subject] = []
        self.rows: list[dict[str, Any]] = []
        self.expected: torch.Tensor | None = None
        began = time.monotonic()
        model = llama(layers, record.device, tiny=record.rehearse)
        self.past = Past(model, context, record.device)
        self.facts = {
            "context_tokens": context,
            "model_layers": layers,
            "weights_bytes": sum(one.nbytes for one in model.parameters()),
            "kv_bytes": context * self.past.layout.token_bytes,
            "seconds_to_build_the_model": time.monotonic() - began,
        }

    def measure(self, names: list[str]) -> None:
        with torch.inference_mode(), ExitStack() as stack:
            self._fill(stack, names)
            self._time()
            self._watch()
            self.subjects.clear()
        self.save()

    def save(self) -> None:
        self.record.put(**{f"context_{self.context}": {**self.facts, "rows": self.rows}})

    def _fill(self, stack: ExitStack, names: list[str]) -> None:
        began = time.monotonic()
        latest = began + 0.55 * (self.deadline - began)
        for name in names:
            row: dict[str, Any] = {"cache": name}
            self.rows.append(row)
            if time.monotonic() > latest:
                row["left_out"] = "no time was left to fill it"
                continue
            start, held = time.monotonic(), self._allocated()
            try:
                subject = stack.enter_context(self.past.filled(name, row))
                self._step(subject)
                self._check(subject)
            except Exception as error:  # noqa: BLE001 - the other caches are worth having
                row["left_out"] = one_line(error)
                self.save()
                continue
            row["seconds_to_fill"] = time.monotonic() - start
            if self.timer.cuda:
                row["cache_device_bytes"] = self._allocated() - held
            row["cache_host_bytes"] = subject.host_bytes()
            self.subjects.append(subject)
            self.save()

    def _time(self) -> None:
        for turn in range(WARM_UP + ROUNDS):
            if time.monotonic() > self.deadline and turn > WARM_UP:
                break
            for subject in list(self.subjects):
                with self._survived(subject):
                    seconds = self.timer.wall_seconds(lambda subject=subject: self._step(subject))
                    if turn >= WARM_UP:
                        subject.times.append(seconds)
        for subject in list(self.subjects):
            median, least = statistics.median(subject.times), min(subject.times)
            subject.row |= {
                "rounds": len(subject.times),
                "median_seconds_per_token": median,
                "min_seconds_per_token": least,
                "all_seconds_per_token": subject.times,
                "median_tokens_per_second": 1 / median,
            }
            with self._survived(subject):
                self._check(subject, "last")
        self.save()

    def _watch(self) -> None:
        """Take one more step each for its peak of memory, and some for its copies."""
        for subject in list(self.subjects):
            with self._survived(subject):
                if self.timer.cuda:
                    self.timer.sync()
                    held = self._allocated()
                    torch.cuda.reset_peak_memory_stats()
                    self._step(subject)
                    self.timer.sync()
                    subject.row["step_peak_device_bytes_above_all_caches"] = torch.cuda.max_memory_allocated() - held
                    subject.row["step_peak_device_bytes_with_its_cache_and_weights"] = (
                        torch.cuda.max_memory_allocated() - held
                        + subject.row["cache_device_bytes"] + self.facts["weights_bytes"]
                    )  # fmt: skip
                if subject.engine is not None:
                    self._watch_copies(subject)
        self.save()

    def _watch_copies(self, subject: Subject) -> None:
        engine = subject.engine
        moved, stalled = dict(engine.moved), engine.stats().counters.stall_seconds
        with Watch(engine) as watch:
            for _ in range(WATCHED):
                self._step(subject)
        stats = engine.stats()
        device, host = stats.tiers["device"].blocks, stats.tiers["host"].blocks
        subject.row |= watch.figures(WATCHED) | {
            "engine_stall_seconds_per_step": (stats.counters.stall_seconds - stalled) / WATCHED,
            "read_path": stats.read_path,
            "cold_read": stats.cold_read,
            "cpu_forwards": stats.counters.cpu_forwards,
            "device_share_of_blocks_ratio": device / (device + host),
            "scratch_buffers": engine.scratch.num_buffers,
            "scratch_buffer_tokens": engine.scratch.buffer_tokens,
        }
        for wire, num_bytes in engine.moved.items():
            subject.row[f"{wire.label}_bytes_per_step"] = (num_bytes - moved.get(wire, 0)) / WATCHED

    @contextmanager
    def _survived(self, subject: Subject) -> Iterator[None]:
        """Go on without a cache that failed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            subject.row["error"] = one_line(error)
            for key in [one for one in subject.row if one.endswith(("seconds_per_token", "tokens_per_second"))]:
                del subject.row[key]
            self.subjects.remove(subject)

    @staticmethod
    def _step(subject: Subject) -> None:
        subject.logits = subject.step()

    def _check(self, subject: Subject, when: str = "first") -> None:
        """Compare the logits of a step with the dynamic cache's at the same step."""
        assert subject.logits is not None
        key = f"{when}_logit_difference_relative_to_largest_logit"
        if subject.name == "dynamic":
            self.expected = subject.logits.float()
            if when == "first":
                self.facts["same_figure_for_a_wrong_cache"] = self._off(self._wrong_logits())
            return
        off = subject.row[key] = self._off(subject.logits)
        if not off <= TOLERANCE["bfloat16"]:
            raise TierKVError(f"its logits are {off:.2g} off the dynamic cache's: no time of it is kept")

    def _off(self, logits: torch.Tensor) -> float:
        if self.expected is None:
            raise TierKVError("there is no dynamic cache to compare it with, so it is not timed")
        return float((logits.float() - self.expected).abs().max() / self.expected.abs().max())

    def _wrong_logits(self) -> torch.Tensor:
        """What a cache of other content gives: as far off as the check must be able to see."""
        cache = DynamicCache(config=self.past.model.config)
        for layer, (keys, values) in enumerate(self.past.content(seed=1)):
            cache.update(keys, values, layer)
        return self.past.stepper(self.past.model, cache)()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.timer.cuda else 0
