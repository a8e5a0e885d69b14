"""Find the architecture of a model: in the built-in table, in a ``config.json``, or on the hub.

    find_architecture("llama-3.1-8b")        the table, by name or by the model's id on the hub
    find_architecture("./my-model")          a folder with a config.json, or the file itself
    find_architecture("owner/model")         the hub's local cache, and then the hub

No torch and no transformers; only a config that leaves sizes out makes transformers, where it is installed, fill them in.
"""

import json
import re
import stat
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final

from tierkv.architecture_config import read_config
from tierkv.architecture_layers import GROWING, Architecture, Kind, KvLayer, Weights
from tierkv.architecture_text import ImpossibleValue
from tierkv.errors import ConfigError, UnsupportedModel

__all__ = [
    "GROWING",
    "Architecture",
    "Kind",
    "KvLayer",
    "Weights",
    "canonical_name",
    "check_regular",
    "find_architecture",
    "model_names",
]

_TABLE: Final = Path(__file__).with_name("models.toml")
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LARGEST_FILE: Final = 16 << 20


def model_names() -> tuple[str, ...]:
    """Return the names in the built-in table."""
    return tuple(_table())


def find_architecture(name: str) -> Architecture:
    """Return the architecture that a name stands for.

    Args:
        name: of the built-in table (in any case, or the model's id on the hub); the path of a ``config.json`` or of a
            folder that holds one; or the id of another hub model.

    Raises:
        ConfigError: there is no such model, or its config cannot be read.
        UnsupportedModel: the model has no KV cache, or its config does not say enough.
    """
    if not name.strip() or "\0" in name:
        raise ConfigError(f"the model has no name ({_legal()})")
    found = _aliases().get(name.strip().casefold())
    if found is not None:
        return _from_table(found)
    try:
        path = Path(name).expanduser()
        is_there = path.exists()
    except (OSError, RuntimeError):
        raise ConfigError(f"{name}: no such file or folder ({_legal()})") from None
    if is_there:
        return _from_file(path / "config.json" if path.is_dir() else path)
    if name[0] in "./~" or path.suffix == ".json":
        raise ConfigError(f"{name}: no such file or folder ({_legal()})")
    near = _near(name)
    meant = f", did you mean {' or '.join(near)}?" if near else ""
    if not _HUB_ID.fullmatch(name):
        known = "" if near else f"known: {', '.join(model_names())}; "
        raise ConfigError(f"unknown model {name!r}{meant} ({known}{_legal()})")
    from tierkv.integrations.hf_config import fetch_config

    try:
        config = fetch_config(name)
    except ConfigError as error:
        raise ConfigError(f"{error}{meant}") from None
    return _read(config, name=name, source=f"config.json of {name}")


def check_regular(path: Path) -> None:
    """Refuse what is there and no file, such as a named pipe, which would be waited for without end.

    Raises:
        ConfigError: it is one.
    """
    try:
        mode = path.expanduser().stat().st_mode
    except (OSError, ValueError, RuntimeError):
        return  # whoever opens it has a message for that
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigError(f"{path}: no regular file (it is a pipe or a device); write it to a file and give that")


def canonical_name(name: str) -> str:
    """Return one spelling for all names of a model: that of the table, where it has it; a path counts by what lies there."""
    known = _aliases()
    wanted = name.strip()
    if (found := known.get(wanted.casefold())) is not None:
        return found
    try:
        is_there = Path(wanted).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        is_there = False
    if not is_there and not wanted.startswith((".", "/", "~")):
        return wanted.casefold()
    if is_there:
        with suppress(ConfigError, UnsupportedModel):  # it may have held a config when it was written down
            read = find_architecture(wanted).name.casefold()
            return known.get(read, read)
    # What a folder is called on another machine is all that is left of its path.
    tail = Path(wanted.removesuffix("config.json")).name.casefold()
    return known.get(tail, tail)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


@cache
def _aliases() -> Mapping[str, str]:
    """Return what each spelling of a name stands for."""
    spellings = {}
    for name, entry in _table().items():
        for spelling in (name, *entry["aliases"]):
            spellings[spelling.casefold()] = name
    return spellings


@cache
def _from_table(name: str) -> Architecture:
    entry = _table()[name]
    return read_config(
        entry["config"], name=name, title=entry["title"], source=entry["source"], parameters=entry["parameters"]
    )


def _from_file(path: Path) -> Architecture:
    check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: not a model's folder, it has no config.json") from None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"{path}: more than {_LARGEST_FILE >> 20} MiB, which is no config.json")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{path}: not JSON{where}; give the config.json of a model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object, as {{...}}; give the config.json of a model")
    named = str(config.get("_name_or_path") or path.resolve().parent.name or "model")
    return _read(config, name=named, source=str(path))


def _read(config: Mapping[str, Any], *, name: str, source: str) -> Architecture:
    try:
        return read_config(config, name=name, title=name, source=source)
    except ImpossibleValue:
        raise
    except UnsupportedModel as error:
        # A file may leave out what its family has by default. A model without a cache stays one.
        if "no KV cache" in str(error) or "cannot be tiered" in str(error):
            raise
        from tierkv.integrations.hf_config import fill_defaults

        filled = fill_defaults(config)
        if filled is None:
            raise
        return read_config(filled, name=name, title=name, source=source)


def _near(name: str) -> list[str]:
    """Return the names that a misspelt one most likely means, or none."""
    wanted = name.strip().casefold().replace("_", "-").replace(" ", "-")
    known = _aliases()
    if wanted in known:
        return [known[wanted]]
    near = get_close_matches(wanted, known, 3, 0.75)
    return list(dict.fromkeys(known[one] for one in near))


def _legal() -> str:
    return "legal: a known model, the path of a config.json, or the id of a hub model as owner/model"
