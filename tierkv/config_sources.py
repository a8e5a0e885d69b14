"""What people set outside a program: a TOML file, and the variables of the environment."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tierkv.errors import ConfigError
from tierkv.sizes import show

PREFIX: Final = "TIERKV_"
LARGEST_FILE: Final = 1 << 20
"""Bytes of a configuration file that are read: an end for what has none, as /dev/zero."""
OTHER_ENVIRONMENT: Final = ("TIERKV_CONFIG", "TIERKV_CACHE_DIR", "TIERKV_PUBLISH")
"""``TIERKV_`` names that are not settings. ``TIERKV_CONFIG`` is the file that is read when no source is given."""


def variable(key: str) -> str:
    """Return the variable that sets a key: ``TIERKV_DEVICE__CAPACITY`` for ``device.capacity``."""
    return f"{PREFIX}{key.replace('.', '__').upper()}"


def read_file(source: object, environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return the settings in a TOML file: the one at ``source``, or for None the one that ``TIERKV_CONFIG`` names.

    Returns:
        The settings, none where no file is named, and where they come from, for messages.

    Raises:
        ConfigError: ``source`` is no path, or the file cannot be read or is no TOML.
    """
    origin = ""
    if source is None and environ.get("TIERKV_CONFIG"):
        source, origin = environ["TIERKV_CONFIG"], " (from TIERKV_CONFIG)"
    if source is None:
        return {}, origin
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a configuration is a path, a mapping, a CacheConfig or None, not {type(source).__name__}")
    if not os.fspath(source):
        raise ConfigError("the configuration file has no name; give the path of a tierkv.toml")
    origin = show(Path(source), longest=200).strip('"') + origin
    return _read_toml(Path(source), origin), origin


def environment_value(text: str, *, is_text: bool) -> Any:
    """Return the value of a variable: read as TOML, or as text where it is no TOML.

    Args:
        text: what the variable holds.
        is_text: whether the key takes text, so that ``SALT=123`` needs no quotes within quotes.
    """
    try:
        parsed = tomllib.loads(f"value = {text}", parse_float=_Written)
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    # No key takes anything else, and what is refused is shown as it was written.
    legal = str if is_text else bool | int | float | str
    return text if len(parsed) > 1 or not isinstance(value, legal) else value


class _Written(float):
    """A number that is shown as it was written: 1e9, not 1000000000.0."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _read_toml(path: Path, origin: str) -> dict[str, Any]:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError(f"{origin}: no such file") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{origin}: cannot be read: {reason}") from None
    if len(data) > LARGEST_FILE:
        raise ConfigError(f"{origin}: more than {LARGEST_FILE >> 20} MiB, which is no configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    try:
        return tomllib.loads(text, parse_float=_Written)
    except (ValueError, RecursionError) as error:
        where = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end of the file")
        raise ConfigError(f"{origin}: not valid TOML: {' '.join(where.split())}") from None
