"""CacheConfig: every setting of tierkv in one frozen object, checked.

Where a key is set twice, a ``TIERKV_`` environment variable wins over a file or mapping, and those win over the
default. A ready ``CacheConfig`` is taken as it is. Every mistake is a one-line ``ConfigError``.

``tierkv.budgets`` turns it into bytes on this machine, ``tierkv.config_toml`` into a file that explains every key.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from tierkv.config_fields import AnySize, AutoSize, BlockSize, Folder, LayersAhead, RealSize, Text
from tierkv.config_messages import Wording
from tierkv.config_sources import OTHER_ENVIRONMENT, PREFIX, environment_value, read_file, variable
from tierkv.errors import ConfigError
from tierkv.sizes import parse_size

if TYPE_CHECKING:
    # Checkers know constructors by the very metaclass that pydantic decorated, not by one derived from it.
    from pydantic._internal._model_construction import ModelMetaclass as _OneLineErrors
else:

    class _OneLineErrors(type(BaseModel)):
        """Lets ``DeviceConfig(...)`` raise a one-line ConfigError where pydantic would raise a report of several."""

        def __call__(cls, **values: Any) -> Any:
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise ConfigError("; ".join(text for _, text in WORDING.problems(error, cls.section))) from None


class _Section(BaseModel, metaclass=_OneLineErrors):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    section: ClassVar[str] = ""


class DeviceConfig(_Section):
    """The fastest tier: memory of the device that the model runs on."""

    section = "device"
    capacity: RealSize = Field(
        default=parse_size("2GiB"),
        description="Bytes of KV on the device, for each GPU. CUDA: of its memory; CPU: a share of RAM. This tier "
        "cannot be turned off. Left at the default it takes at most 40% of what is free.",
    )


class HostConfig(_Section):
    """The second tier: RAM of the machine that a GPU sits in."""

    section = "host"
    capacity: AutoSize = Field(
        default="auto",
        description="Bytes of RAM below the device, page-locked where CUDA is. 0 turns the tier off. auto: with CUDA "
        "16GiB, at most half of what is free; without it 0, as it would be the same RAM as the device tier.",
    )


class DiskConfig(_Section):
    """The last tier: a store on a local SSD."""

    section = "disk"
    path: Folder = Field(
        default=Path("~/.cache/tierkv"),
        description="Folder of the store; made when it is missing. A relative path starts at the working directory.",
    )
    capacity: AnySize = Field(
        default=parse_size("100GiB"),
        description="Bytes of allocated files, bookkeeping included. 0 turns the tier off. Left at the default it "
        "takes at most 40% of what is free.",
    )
    readers: int = Field(default=2, ge=1, le=64, description="Worker threads for copies, and readers of the store.")
    write_batch: int = Field(default=16, ge=1, le=4096, description="Blocks written in one transaction.")
    write_queue: RealSize = Field(
        default=parse_size("256MiB"),
        description="Bytes of RAM that may wait to be written. A block that lives on disk waits for room in it.",
    )


class PlacementConfig(_Section):
    """Which blocks of a live sequence stay on the device."""

    section = "placement"
    keep_first: int = Field(default=1, ge=0, description="First blocks of every sequence that stay on the device.")
    keep_recent: int = Field(
        default=4, ge=1, description="Most recent blocks of every sequence that stay on the device."
    )


class TransferConfig(_Section):
    """How copies between the tiers are scheduled."""

    section = "transfer"
    layers_ahead: LayersAhead = Field(
        default="auto",
        description="Layers ahead of need that cold blocks are fetched. 0: none. auto: 2 on a CPU; on a GPU 1 to 4, as "
        "many as the wire from host memory fills while a layer computes, measured when the engine opens.",
    )


class AttentionConfig(_Section):
    """How attention reads the cache. Every choice gives exact results."""

    section = "attention"
    path: Literal["auto", "paged", "gathered"] = Field(
        default="auto",
        description="gathered: each layer's whole K and V in a scratch buffer, for any model. paged: over the blocks "
        "where they lie. auto: the fastest that this model can take.",
    )
    cold_read: Literal["auto", "stream", "compute", "promote"] = Field(
        default="auto",
        description="How the paged path reads blocks in host memory; those on disk are always streamed. stream: through "
        "buffers on the device. compute: attention on the CPU, where they lie. promote: as stream, and move up for good "
        "what there is room for. auto: in place where the device is a CPU; otherwise as "
        "promote, or as compute where measured costs say that this token is faster so.",
    )


class PrefixConfig(_Section):
    """Reuse of KV between prompts that begin alike."""

    section = "prefix"
    share: bool = Field(
        default=True,
        description="Share the blocks of equal prefixes in memory, within one engine, and keep those that nobody uses any "
        "more until their room is wanted.",
    )
    persist: bool = Field(
        default=False,
        description="Keep prefixes on disk too, for later processes. This writes token ids and wears the SSD. Takes half "
        "of disk.capacity.",
    )
    write_policy: Literal["always", "second_sighting", "never"] = Field(
        default="second_sighting", description="When a prefix is written to disk; never: only what is there is read."
    )
    min_tokens: int = Field(default=256, ge=0, description="Shorter prefixes, in tokens, are not kept on disk.")
    eviction: Literal["lru", "s3fifo", "cost"] = Field(
        default="lru",
        description="Which kept prefix goes first: least recently used, scan-resistant, or cheapest to recompute.",
    )
    ttl_seconds: int = Field(
        default=0, ge=0, description="Seconds after which a kept prefix is forgotten. 0: no limit."
    )
    salt: Text = Field(
        default="", description="Prefixes are shared only between equal salts: give each tenant its own."
    )


class CacheConfig(_Section):
    """Every setting of tierkv: frozen, hashable, checked on construction. The key names are a contract.

    Sizes are given as in a file: ``DeviceConfig(capacity=parse_size("4GiB"))``, or ``load_config({"device":
    {"capacity": "4GiB"}})``, which also heeds the environment.

    Raises:
        ConfigError: a key is unknown, or a value is not legal.
    """

    block_size: BlockSize = Field(
        default=32, description="Tokens in a block, the unit of placement and of prefix sharing."
    )
    device: DeviceConfig = DeviceConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    placement: PlacementConfig = PlacementConfig()
    transfer: TransferConfig = TransferConfig()
    attention: AttentionConfig = AttentionConfig()
    prefix: PrefixConfig = PrefixConfig()

    def explicit(self) -> dict[str, Any]:
        """Return the keys that were set, by dotted name; the others follow the defaults."""
        return {key: self.value(key) for key in FIELDS if self.is_explicit(key)}

    def is_explicit(self, key: str) -> bool:
        """Whether the key with this dotted name was set, as opposed to left at its default."""
        section, _, name = key.rpartition(".")
        return name in (getattr(self, section) if section else self).model_fields_set

    def replace(self, values: Mapping[str, Any], origin: str = "") -> "CacheConfig":
        """Return a config in which ``values``, by dotted name, are set as well. Errors name ``origin``."""
        merged: dict[str, Any] = {}
        for key, value in {**self.explicit(), **values}.items():
            _set(merged, key, value)
        return _build(merged, dict.fromkeys(values, origin), origin)

    def value(self, key: str) -> Any:
        """Return the value of a key by its dotted name."""
        section, _, name = key.rpartition(".")
        return getattr(getattr(self, section) if section else self, name)


SECTIONS: Final[Mapping[str, type[_Section]]] = {
    name: field.annotation
    for name, field in CacheConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, _Section)
}
FIELDS: Final[Mapping[str, FieldInfo]] = {
    **{name: field for name, field in CacheConfig.model_fields.items() if name not in SECTIONS},
    **{f"{name}.{key}": field for name, model in SECTIONS.items() for key, field in model.model_fields.items()},
}
WORDING: Final = Wording(FIELDS, SECTIONS)
_VARIABLES: Final = {variable(key): key for key in FIELDS}


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | CacheConfig | None = None,
    environ: Mapping[str, str] | None = None,
) -> CacheConfig:
    """Return the checked configuration from a source and the environment.

    Args:
        source: the path of a TOML file, a mapping shaped like one, a ready config, or None for the file that
            ``TIERKV_CONFIG`` names and otherwise the defaults.
        environ: the environment, ``os.environ`` when None. ``TIERKV_DEVICE__CAPACITY=4GiB`` sets
            ``device.capacity`` over the file or mapping. A value is read as TOML, and what is not TOML as text. A
            ready ``CacheConfig`` is returned as it is: the environment does not reach into a program's own object.

    Raises:
        ConfigError: everything that is wrong, on one line, with the file or variable it comes from.
    """
    if isinstance(source, CacheConfig):
        return source
    environ = os.environ if environ is None else environ
    if isinstance(source, Mapping):
        values, origin = _plain(source), "configuration mapping"
    else:
        values, origin = read_file(source, environ)
    origins: dict[str, str] = {}
    unknown = []
    # In any case: who writes tierkv_block_size means a setting, and would look for the reason elsewhere.
    ours = (name for name in environ if name.upper().startswith(PREFIX) and name not in OTHER_ENVIRONMENT)
    for name in sorted(ours):
        key = _VARIABLES.get(name)
        if key is None:
            unknown.append(WORDING.unknown_variable(name))
        else:
            is_text = FIELDS[key].annotation in {str, Path}
            _set(values, key, environment_value(environ[name], is_text=is_text))
            origins[key] = name
    return _build(values, origins, origin, unknown)


def _build(values: dict[str, Any], origins: Mapping[str, str], origin: str, unknown: Sequence[str] = ()) -> CacheConfig:
    """Validate ``values``, or raise everything that is wrong at once.

    Keys come from ``origin`` unless ``origins`` says otherwise; ``unknown`` holds complaints about variables.
    """
    problems: dict[str, list[str]] = {}  # by where they come from
    config = None
    try:
        config = CacheConfig.model_validate(values)
    except ValidationError as error:
        for key, text in WORDING.problems(error):
            problems.setdefault(origins.get(key, origin), []).append(text)
    if unknown:
        problems["environment"] = list(unknown)
    if config is None or problems:
        raise ConfigError("; ".join(": ".join(filter(None, (n, "; ".join(t)))) for n, t in problems.items()))
    return config


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a mapping that may hold ready sections, as nested dicts of what was set."""
    copy: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, _Section):
            value = {name: getattr(value, name) for name in value.model_fields_set}  # noqa: PLW2901
        copy[str(key)] = _plain(value) if isinstance(value, Mapping) else value
    return copy


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at a dotted key; a section that is not one is left for validation to report."""
    section, _, name = key.rpartition(".")
    target = values.setdefault(section, {}) if section else values
    if isinstance(target, dict):
        target[name] = value
