"""tierkv.toml: a configuration as a file in which every key is explained."""

import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tierkv.config import FIELDS, SECTIONS, WORDING, CacheConfig
from tierkv.sizes import LEGAL_SIZES, show

_HEADER: Final = (
    "tierkv.toml: every key of tierkv with its meaning and its default. Remove the # in front of a key to set it. "
    f"Sizes: {LEGAL_SIZES} when the engine is made. A value that is set must fit on the machine or is refused; a "
    "default adapts. Each key can also be set in the environment: TIERKV_BLOCK_SIZE=64, TIERKV_DEVICE__CAPACITY=4GiB."
)


def default_toml() -> str:
    """Return a tierkv.toml that explains every key and, with all of them commented out, sets none."""
    return as_toml(CacheConfig())


def as_toml(config: CacheConfig, reasons: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a tierkv.toml with every key explained; a key that was not set is commented out, as its default.

    Reading it back gives an equal config in which the same keys are set.

    Args:
        config: the values.
        reasons: by dotted name, why a key has its value.
    """
    lines, section = _comment(_HEADER), ""
    for key, field in FIELDS.items():
        parent, _, name = key.rpartition(".")
        if parent != section:
            section = parent
            lines += ["", f"[{section}]", *_comment(SECTIONS[section].__doc__ or "")]
        lines += ["", *_comment(f"{field.description} Legal: {WORDING.legal(key)}.")]
        lines += _comment(f"Why: {reasons[key]}") if key in reasons else []
        lines += [f"{'' if config.is_explicit(key) else '#'}{name} = {show(config.value(key), longest=None)}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
