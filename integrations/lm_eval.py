"""lm-evaluation-harness with a tiered cache: its tasks and scores, a Hugging Face model, the KV cache in tiers.

The harness finds models of other packages only once they are imported, so its command line is started from here. All that
it takes, it takes here too; ``config`` is the tierkv.toml, and without it the defaults hold:

    python -m tierkv.integrations.lm_eval run --model tierkv --model_args pretrained=MODEL,config=tierkv.toml --tasks TASKS

From Python, after ``import tierkv.integrations.lm_eval``:

    lm_eval.simple_evaluate(model="tierkv", model_args={"pretrained": "MODEL", "config": "tierkv.toml"}, tasks=[...])

Needs the extra ``lm-eval``.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

# The package of models first: the harness lists its own only where nothing is registered yet.
from lm_eval.api.registry import register_model  # type: ignore[import-not-found]
from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

from tierkv.config import CacheConfig
from tierkv.errors import ConfigError, TierKVError
from tierkv.integrations.hf_generate import ModelEngine, attach


@register_model("tierkv")
class TieredHFLM(HFLM):  # type: ignore[misc]  # where the harness is not installed, its class is Any
    """The harness' ``hf`` model with tierkv attached: answers and likelihoods come through tiered caches.

    Attributes:
        engine: of the tiers; ``engine.stats()`` says what they did.
    """

    def __init__(
        self,
        pretrained: Any,
        config: str | os.PathLike[str] | Mapping[str, Any] | CacheConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """Load the model as ``hf`` does and attach to it.

        Args:
            pretrained: a path or hub id, or a loaded model.
            config: path of a ``tierkv.toml``, or whatever else ``tierkv.attach`` takes.
            kwargs: all others of the harness' ``HFLM``.

        Raises:
            ConfigError: a setting is wrong or does not fit this machine.
            UnsupportedModel: the model cannot be tiered.
        """
        if kwargs.get("mixed_precision_dtype") is not None:
            raise ConfigError(
                "mixed_precision_dtype runs the model under autocast, in other dtypes than a tiered cache is made for; load "
                "it in that dtype instead: dtype=bfloat16"
            )
        super().__init__(pretrained, **kwargs)
        self.engine: ModelEngine = attach(self.model, config)

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of a forward, its KV in a tiered cache of its own."""
        if attn_mask is not None or labels is not None:
            return super()._model_call(inps, attn_mask, labels)
        cache = self.engine.new_cache()
        try:
            with torch.no_grad():
                return self.model(inps, cache=cache, use_cache=True).logits
        finally:
            cache.close()


def main() -> None:
    """Run the harness' command line, with the model ``tierkv`` in its list."""
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found]

    try:
        cli_evaluate()
    except TierKVError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
