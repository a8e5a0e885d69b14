"""A tiered KV cache for LLM inference: device memory, host memory and SSD behind one cache.

Importing this package loads none of the libraries it works with; a name does when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tierkv.config import CacheConfig, load_config
    from tierkv.engine import Engine
    from tierkv.errors import (
        BlockLost,
        CapacityError,
        ClosedError,
        ConfigError,
        RecordError,
        StoreError,
        StoreFull,
        TierKVError,
        TornForward,
        TransferTimeout,
        UnsafeCall,
        UnsupportedModel,
    )
    from tierkv.integrations.hf_generate import attach
    from tierkv.metrics import Stats

__version__: Final = "0.1.0"

__all__ = [
    "BlockLost",
    "CacheConfig",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "Engine",
    "RecordError",
    "Stats",
    "StoreError",
    "StoreFull",
    "TierKVError",
    "TornForward",
    "TransferTimeout",
    "UnsafeCall",
    "UnsupportedModel",
    "__version__",
    "attach",
    "load_config",
]

_HOMES: Final = {
    "attach": "tierkv.integrations.hf_generate",
    "CacheConfig": "tierkv.config",
    "load_config": "tierkv.config",
    "Engine": "tierkv.engine",
    "Stats": "tierkv.metrics",
}
"""Where each public name lives, unless it is an error."""


def __getattr__(name: str) -> Any:
    """Load the module behind a public name when the name is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "tierkv.errors")), name)
    globals()[name] = value  # the next use does not come here again
    return value


def __dir__() -> list[str]:
    """List the public names and the sub-modules already loaded."""
    return sorted({*globals(), *__all__})
