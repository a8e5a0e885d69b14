"""What ``tierkv bench restore`` compares tierkv with: no cache, a copy of a filled one, and files saved by hand.

A process loads the model once and stays. A restart is what a new process would do, short of that: whatever the run
before it has opened is closed, the file's pages are dropped from the page cache, and everything is opened anew.
"""

import copy
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tierkv.benchmarks.machine import drop_page_cache
from tierkv.benchmarks.restore_process import counted_tokens
from tierkv.errors import ConfigError, UnsupportedModel
from tierkv.integrations.hf_compat import block_layout
from tierkv.integrations.hf_load import load_model

WARM_UP_TOKENS: Final = 64
TOUCH_TOKENS: Final = 4
FILES: Final = {"torch_load": "kv.pt", "safetensors": "kv.safetensors"}

Answer = dict[str, Any]


class Contender:
    """The model, the prompt, and the first token of an answer."""

    def load(self, model: str, dtype: str, threads: int) -> Answer:
        """Load the model and the text that prompts are cut from.

        Returns:
            Facts: ``model``, ``dtype``, ``limit`` (tokens, or None), ``text_tokens``, ``kv_bytes_per_token``.

        Raises:
            ConfigError: there is no such model, or no text.
            UnsupportedModel: a saved DynamicCache would not be all of its state.
        """
        torch.set_num_threads(threads)
        self.model: Any
        self.model, tokenizer = load_model(model, dtype)
        config = self.model.config
        if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers):
            raise UnsupportedModel(
                f"{model} keeps more, or less, than all keys and values, which the recipes that tierkv is compared with "
                f"do not save; give a model with full attention in every layer"
            )
        text = tokenizer(_text(), return_tensors="pt")["input_ids"]
        self.text: torch.Tensor = text.to(self.model.device)
        if int(text.max()) >= (known := self.model.get_input_embeddings().weight.shape[0]):
            raise ConfigError(
                f"the tokenizer of {model} makes tokens that its model does not know (it knows {known:,})"
            )
        layout, _ = block_layout(self.model, 32)
        limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        return {
            "model": "SmolLM2-135M-Instruct" if model == "smollm2" else config.name_or_path or model,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "limit": limit if isinstance(limit, int) and limit > 0 else None,
            "text_tokens": self.text.shape[1],
            "kv_bytes_per_token": layout.block_bytes // 32,
        }

    def begin(self, tokens: int, folder: str, block_size: int) -> None:
        """Take the first tokens of the text as the prompt, files of it in ``folder``, and warm the process up."""
        self.close()
        self.ids = self.text[:, :tokens]
        self.folder = Path(folder)
        self.block_size = block_size
        self.warm_up(self.text[:, -WARM_UP_TOKENS:])

    def warm_up(self, other: torch.Tensor) -> None:
        """Generate a few tokens from others than the prompt's."""
        self.generate(other, 2)

    def generate(self, ids: torch.Tensor, new_tokens: int, **more: Any) -> tuple[int, float]:
        """Generate greedily; return the first new token and the seconds that the call took."""
        began = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False, temperature=None, top_p=None, top_k=None, num_beams=1, pad_token_id=0,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            **more,
        )  # fmt: skip
        token = int(out[0, ids.shape[1]])
        return token, time.perf_counter() - began

    def after_restart(self, open_files: Callable[[], float], **more: Any) -> Answer:
        """Drop the page cache, touch the model, open what lies on disk, and time the first token."""
        gc.collect()
        left = drop_page_cache(self.folder)
        with torch.no_grad():
            self.model(input_ids=self.text[:, :TOUCH_TOKENS], use_cache=False)
        opened = open_files()
        with counted_tokens(self.model) as counts:
            token, seconds = self.generate(self.ids, 1, **more)
        return {"seconds": seconds, "opened": opened, "token": token, "prefilled": sum(counts), "left": left}

    def close(self) -> None:
        """Close and let go of what the runs have opened."""


class Stock(Contender):
    """No cache across calls, and a copy of a filled one: the recipe in transformers' documentation."""

    cache: Any = None

    def cold(self, chunk: int | None) -> Answer:
        """Compute the whole prompt, in chunks of so many tokens."""
        self.close()
        cache = DynamicCache(config=self.model.config)
        more = {} if chunk is None else {"prefill_chunk_size": chunk}
        with counted_tokens(self.model) as counts:
            token, seconds = self.generate(self.ids, 1, cache=cache, **more)
        self.cache = cache
        return {"seconds": seconds, "token": token, "prefilled": sum(counts)}

    def save(self, folders: dict[str, str]) -> None:
        """Keep the KV of the last ``cold`` in files, by kind in which folder, written through to the disk."""
        tensors: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.cache.layers):
            tensors |= {f"{index}.keys": layer.keys.contiguous(), f"{index}.values": layer.values.contiguous()}
        for kind, folder in folders.items():
            path = Path(folder, FILES[kind])
            (torch.save if kind == "torch_load" else save_file)(tensors, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self.cache.crop(-1)

    def copied(self) -> Answer:
        """Copy the filled cache and generate from the copy."""
        began = time.perf_counter()
        filled = copy.deepcopy(self.cache)
        copying = time.perf_counter() - began
        token, seconds = self.generate(self.ids, 1, cache=filled)
        return {"seconds": copying + seconds, "token": token}

    def close(self) -> None:
        """Let go of the filled cache."""
        self.cache = None


class SavedFile(Contender):
    """All tensors in one file, put into a DynamicCache whose last token is computed again."""

    kind: str

    def restart(self) -> Answer:
        """Load the file and generate."""
        path, device = self.folder / FILES[self.kind], self.model.device
        cache = DynamicCache(config=self.model.config)

        def fill() -> float:
            began = time.perf_counter()
            tensors = self.read(path, device)
            for index in range(len(tensors) // 2):
                cache.update(tensors[f"{index}.keys"], tensors[f"{index}.values"], index)
            cache.crop(-1)
            return time.perf_counter() - began

        answer = self.after_restart(fill, cache=cache)
        return {**answer, "seconds": answer["seconds"] + answer["opened"]}

    def read(self, path: Path, device: torch.device) -> dict[str, torch.Tensor]:
        """Read all tensors of a file."""
        raise NotImplementedError


class TorchFile(SavedFile):
    """``torch.save`` and ``torch.load``."""

    kind = "torch_load"

    def read(self, path: Path, device: torch.device) -> dict[str, torch.Tensor]:
        """Read all tensors of a file."""
        tensors: dict[str, torch.Tensor] = torch.load(path, map_location=device)
        return tensors


class SafetensorsFile(SavedFile):
    """The same with safetensors."""

    kind = "safetensors"

    def read(self, path: Path, device: torch.device) -> dict[str, torch.Tensor]:
        """Read all tensors of a file."""
        return load_file(path, str(device))


def _text() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "the prompts are Python's own documentation (pydoc_data.topics), and this Python came without it; install "
            "the full standard library"
        ) from None
    return "".join(topics.values())
