"""One cache at one length, in a process of its own: ``python -m tierkv.benchmarks.longcontext_child`` answers questions.

load     the model, and facts about it
plan     which rows there will be
begin    take a cache and a length, and warm up
wires    what plain copies reach on this machine
sample   run one conversation; its row, or the error in its place
"""

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from tierkv.benchmarks import longcontext_trace, machine
from tierkv.benchmarks.longcontext_caches import Caches, Subject, why_not
from tierkv.benchmarks.longcontext_memory import PeakMemory
from tierkv.benchmarks.longcontext_prompts import Item, Prompts, describe
from tierkv.benchmarks.longcontext_rates import machine_rates
from tierkv.benchmarks.longcontext_timing import Clock, times_of
from tierkv.benchmarks.longcontext_wires import Rates
from tierkv.benchmarks.restore_process import serve
from tierkv.errors import ConfigError, TierKVError
from tierkv.integrations.hf_compat import block_layout
from tierkv.integrations.hf_load import load_model

KEEPS_PREFIXES: Final = "system_prompt"
"""The task whose samples are conversations of one engine: every other one begins on an engine that knows nothing."""
WARM_UP_TOKENS: Final = 64
_BLOCK: Final = 32
_AGAIN: Final = 3
"""Tokens that are run once more for a trace: the first puts the cache right, the second warms up what watches."""
_OOM_SCORE: Final = "500"

Answer = dict[str, Any]


class LongContext:
    """A loaded model, and the cache that it is run with."""

    caches: Caches | None = None
    traced: Answer | None = None

    def load(self, model: str, dtype: str, folder: str) -> Answer:
        """Load the model.

        Args:
            model: as ``load_model`` takes it.
            dtype: of it and of K and V.
            folder: of the run.

        Returns:
            Facts: ``model``, ``dtype``, ``device``, ``limit`` (tokens, or None), ``kv_bytes_per_token``, ``machine``,
            ``file_system``.

        Raises:
            ConfigError: there is no such model, or its tokenizer is another's.
            UnsupportedModel: it is no decoder-only language model, or cannot be tiered.
        """
        with suppress(OSError):  # where memory runs out, this process shall go and not one that others wait for
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
        self.model: Any
        self.model, self.tokenizer = load_model(model, dtype)
        config = self.model.config
        limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        layout, _ = block_layout(self.model, _BLOCK)
        return {
            "model": "SmolLM2-135M-Instruct" if model == "smollm2" else config.name_or_path or model,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "limit": limit if isinstance(limit, int) and limit > 0 else None,
            "kv_bytes_per_token": layout.token_bytes,
            "chat_template": bool(getattr(self.tokenizer, "chat_template", None)),
            "machine": machine.description(),
            "file_system": machine.file_system(Path(folder)),
        }

    def left_out(self, caches: Sequence[str]) -> dict[str, str]:
        """Return the caches that cannot run here, and why."""
        reasons = {name: why_not(name, self.model) for name in caches}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def plan(
        self, tasks: Sequence[str], lengths: Sequence[int], samples: int, seed: int, max_new_tokens: int | None
    ) -> Answer:
        """Return which rows there will be; see ``describe``.

        Raises:
            ConfigError: a length or a file does not do.
        """
        self.prompts = Prompts(self.tokenizer, tasks, samples, seed, max_new_tokens)
        self.lengths = list(lengths)
        items = self.prompts.items(self.lengths)
        known = self.model.get_input_embeddings().weight.shape[0]
        largest = max((token for some in items.values() for item in some for token in item.ids), default=0)
        if largest >= known:
            raise ConfigError(
                f"the tokenizer makes token {largest:,} of a prompt, and the model knows tokens 0 to {known - 1:,}; get "
                f"tokenizer and weights of the same model"
            )
        return describe(items)

    def wires(self, folder: str) -> Rates:
        """Return what plain copies reach here, by wire; see ``machine_rates``."""
        return machine_rates(self.model.device, Path(folder))

    def begin(self, cache: str, length: int, folder: str, plan: Answer, rates: Rates | None = None) -> Answer:
        """Take a cache and a length.

        Args:
            cache: its name.
            length: of every conversation, at most.
            folder: for disk tiers.
            plan: arguments of ``plan``, where this process was not asked for it.
            rates: what ``wires`` returned.

        Returns:
            ``share``: of the KV that tierkv's memory tiers take, where it was chosen here.

        Raises:
            TierKVError: tierkv refuses.
        """
        if not hasattr(self, "prompts"):
            self.prompts = Prompts(self.tokenizer, plan["tasks"], plan["samples"], plan["seed"], plan["max_new_tokens"])
            self.lengths = list(plan["lengths"])
        items = self.prompts.of(length, self.lengths)
        self.items = {(item.task, item.sample): item for item in items}
        self.end_token = self.model.generation_config.eos_token_id
        self.caches = Caches(self.model, cache, length, Path(folder), rates)
        self.task = ""
        try:
            self._warm_up(items[0])
        except TierKVError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a cache fails with is its result
            raise TierKVError(_words(error)) from None
        return {"share": self.caches.share}

    def sample(self, task: str, sample: int, trace: bool) -> Answer:  # noqa: FBT001 - a JSON key
        """Run one conversation.

        Args:
            task: its name.
            sample: its number.
            trace: run the last tokens once more, watched, where the cache is tierkv's.

        Returns:
            Its measures or ``error``, and ``trace``, or None.
        """
        item = self.items[task, sample]
        if task != self.task and self.caches is not None:
            self.caches.close()
        self.task, self.traced = task, None
        row: Answer = {
            "task": task,
            "sample": sample,
            "depth": item.depth,
            "prompt_tokens": len(item.ids),
            "error": None,
        }
        gc.collect()
        memory = PeakMemory(self.model.device)
        try:
            row |= self._run(item, memory, keep=task == KEEPS_PREFIXES, trace=trace)
        except Exception as error:  # noqa: BLE001 - whatever a cache fails with is its result
            row |= {"error": _words(error), **memory.measures()}
        return {**row, "trace": self.traced}

    def close(self) -> None:
        """End what is open."""
        if self.caches is not None:
            self.caches.close()

    def _run(self, item: Item, memory: PeakMemory, *, keep: bool, trace: bool) -> Answer:
        assert self.caches is not None
        ids, texts, tokens, clocks = list(item.ids), [], [], []
        with self.caches.conversation(item.tokens, keep=keep) as subject:
            for following in (*item.turns, ()):
                clock = Clock()
                answer = self._generate(ids, item.new_tokens, subject.cache, clock)
                texts.append(
                    str(self.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False))
                )
                tokens += answer
                clocks.append(clock)
                ids += [*self._without_end(answer), *following] if following else answer
            measures = {**subject.measures(), **memory.measures()}
            if trace:
                with suppress(TierKVError):  # the row is there; without a trace the page has no timeline
                    self.traced = self._trace(ids, subject)
        output = "\n".join(texts)
        return {
            "score": float(item.source.score(output)),
            "output": output,
            "tokens": tokens,
            **times_of(clocks),
            **measures,
        }

    def _generate(self, ids: Sequence[int], new_tokens: int, cache: Any, clock: Clock) -> list[int]:
        fed = torch.tensor([list(ids)], device=self.model.device)
        clock.begin()
        out = self.model.generate(
            fed,
            attention_mask=torch.ones_like(fed),
            do_sample=False, temperature=None, top_p=None, top_k=None, num_beams=1, pad_token_id=0,
            max_new_tokens=new_tokens, cache=cache, streamer=clock,
        )  # fmt: skip
        answer: list[int] = out[0, len(ids) :].tolist()
        return answer

    def _trace(self, ids: Sequence[int], subject: Subject) -> Answer | None:
        """Run the last tokens of a conversation once more and watch the last; None where that cannot be watched."""
        if subject.engine is None or longcontext_trace.why_not(subject.engine) or len(ids) <= _AGAIN:
            return None
        clock = Clock()
        with longcontext_trace.watched(subject.engine) as spans:
            self._generate(ids[:-_AGAIN], _AGAIN, subject.cache, clock)
        if len(clock.times) < _AGAIN:
            return None
        token = longcontext_trace.Span(longcontext_trace.MODEL, longcontext_trace.TOKEN, *clock.times[-2:])
        return longcontext_trace.chrome_trace(spans, token, {"tokens before": len(ids) - 1})

    def _without_end(self, answer: list[int]) -> list[int]:
        """Return an answer without the token that ends it: the text between the turns has its own."""
        ends = self.end_token if isinstance(self.end_token, list) else [self.end_token]
        return answer[:-1] if answer and answer[-1] in ends else answer

    def _warm_up(self, item: Item) -> None:
        """Generate two tokens after the beginning of a prompt, untimed: it loads kernels and fills allocators."""
        assert self.caches is not None
        ids = item.ids[:WARM_UP_TOKENS]
        with self.caches.conversation(len(ids) + 2, keep=False) as subject:
            self._generate(ids, 2, subject.cache, Clock())


def _words(error: Exception) -> str:
    """Return an error on one line."""
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, TierKVError) else f"{type(error).__name__}: {text}"


ASKED: Final = ("load", "left_out", "plan", "wires", "begin", "sample", "close")


def main(subject: Callable[[], LongContext] = LongContext) -> None:
    """Answer until nothing more is asked."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asked = subject()
    try:
        serve({name: getattr(asked, name) for name in ASKED})
    finally:
        asked.close()


if __name__ == "__main__":
    main()
