"""A model's ``config.json`` from the hub's cache or the hub, and the sizes that one leaves out. No weights are read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tierkv.errors import ConfigError

SECONDS: Final = 10
"""How long the hub may take to answer."""


def fetch_config(name: str) -> dict[str, Any]:
    """Return what the ``config.json`` of a hub model holds.

    Args:
        name: the model's id on the hub, ``owner/model``.

    Raises:
        ConfigError: it is not in the local cache and the hub does not give it.
    """
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise ConfigError(
            f'{name}: models on the hub need the extra hf (pip install -e ".[hf]"); or give the path of a config.json'
        ) from None
    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        found = _download(hf_hub_download, name)
    try:
        config = json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: its config.json cannot be read ({error}); remove {found} and try again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: its config.json is no JSON object; give another model")
    return config


def _download(download: Any, name: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:  # the download itself would only say that it found nothing
        raise _nothing(name, "HF_HUB_OFFLINE is set and it is not in the local hub cache")
    try:
        return str(download(name, "config.json", etag_timeout=SECONDS))
    except GatedRepoError:
        why = "its owner asks for a login; download its config.json by hand"
    except RepositoryNotFoundError:
        why = "the hub has no such model, or it is private"
    except LocalEntryNotFoundError:
        why = "it is not in the local hub cache, and the hub cannot be reached"
    except Exception as error:  # noqa: BLE001 - the hub's HTTP library, and with it the class, changes between releases
        why = f"the hub does not give it: {' '.join(str(error).split())[:200]}"
    raise _nothing(name, why)


def _nothing(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name}: no config.json from the hub: {why}; or give the path of a config.json")


def fill_defaults(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a config with the sizes that its family has by default, or None where transformers cannot tell."""
    try:
        from transformers import AutoConfig

        values = dict(config)
        filled = AutoConfig.for_model(values.pop("model_type"), **values)
        return dict(filled.to_dict())
    except Exception:  # noqa: BLE001 - whatever keeps transformers from reading it, the caller has a message of its own
        return None
