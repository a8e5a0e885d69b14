"""CacheConfig: every setting of tierkv in one frozen object, and the bytes it comes to on this machine.

    load_config(path, mapping or nothing)  ->  CacheConfig     what was asked for, checked
    resolve(config, what is free)          ->  Budgets         bytes of each tier, or why they do not fit
    default_toml()                         ->  str             tierkv.toml with every key explained

Where a key is set twice, a ``TIERKV_`` environment variable wins over a file or mapping, and those win over the
default. A ready ``CacheConfig`` is taken as it is. Every mistake is a one-line ``ConfigError``.
"""

import os
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from tierkv.errors import ConfigError
from tierkv.sizes import LEGAL_SIZES, Claim, Size, fit, format_bytes, parse_size, show

NOT_YET: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.path": ("paged",),
    "attention.cold_read": ("compute", "promote"),
    "prefix.persist": (True,),
}
"""Values that this version knows but cannot honour, so it refuses them. Whoever builds one deletes it here."""

OTHER_ENVIRONMENT: Final = ("TIERKV_CONFIG", "TIERKV_CACHE_DIR")
"""``TIERKV_`` names that are not settings. ``TIERKV_CONFIG`` is the file that is read when no source is given."""

_PREFIX: Final = "TIERKV_"
_HOST_AUTO: Final = parse_size("16GiB")
_BARE_KEY: Final = re.compile("[A-Za-z0-9_-]+")


if (
    TYPE_CHECKING
):  # checkers know constructors by the very metaclass that pydantic decorated, not by one derived from it
    from pydantic._internal._model_construction import ModelMetaclass as _OneLineErrors
else:

    class _OneLineErrors(type(BaseModel)):
        """Lets ``DeviceConfig(...)`` raise a one-line ConfigError where pydantic would raise a report of several."""

        def __call__(cls, **values: Any) -> Any:
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise ConfigError("; ".join(text for _, text in _problems(error, cls.section))) from None


class _Section(BaseModel, metaclass=_OneLineErrors):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    section: ClassVar[str] = ""

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_what_is_not_built(cls, value: object, info: ValidationInfo) -> object:
        key = f"{cls.section}.{info.field_name}".lstrip(".")
        if value in NOT_YET.get(key, ()):
            raise ValueError(f"{show(value)} is not available in this version (legal: {_legal(key)})")
        return value


@dataclass(frozen=True)
class _Legal:
    """What is legal for a field, where its type and bounds do not say it."""

    text: str


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is not possible (legal: {_legal('block_size')})")
    return value


def _above_zero(value: Any) -> Size:
    size = parse_size(value)
    if size.is_zero:
        raise ValueError(f"{show(value)} is not possible: it must be more than nothing (legal: {LEGAL_SIZES})")
    return size


def _size_or_auto(value: Any) -> Size | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error).replace("legal: ", 'legal: "auto", ')) from None


def _folder(value: Any) -> Path:
    if not isinstance(value, str | PurePath) or not str(value) or not str(value).isprintable():
        raise ValueError(f"{show(value)} is not possible (legal: {_legal('disk.path')})")
    return Path(value)


def _utf8(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{show(value)} is not possible: it is not Unicode (legal: {_legal('prefix.salt')})")
    return value


_Text = Annotated[str, AfterValidator(_utf8)]
_BlockSize = Annotated[int, Field(ge=16, le=512), AfterValidator(_power_of_two), _Legal("16, 32, 64, 128, 256 or 512")]
_AnySize = Annotated[Size, PlainValidator(parse_size), _Legal(LEGAL_SIZES)]
_RealSize = Annotated[Size, PlainValidator(_above_zero), _Legal(f"{LEGAL_SIZES}; more than 0")]
_AutoSize = Annotated[Size | Literal["auto"], PlainValidator(_size_or_auto), _Legal(f'"auto", {LEGAL_SIZES}')]
_Folder = Annotated[Path, PlainValidator(_folder), _Legal("the path of a folder")]


class DeviceConfig(_Section):
    """The fastest tier: memory of the device that the model runs on."""

    section = "device"
    capacity: _RealSize = Field(
        default=parse_size("2GiB"),
        description="Bytes of KV on the device, for each GPU. CUDA: of its memory; CPU: a share of RAM. This tier "
        "cannot be turned off. Left at the default it takes at most 40% of what is free.",
    )


class HostConfig(_Section):
    """The second tier: RAM of the machine that a GPU sits in."""

    section = "host"
    capacity: _AutoSize = Field(
        default="auto",
        description="Bytes of RAM below the device, page-locked where CUDA is. 0 turns the tier off. auto: with CUDA "
        "16GiB, at most half of what is free; without it 0, as it would be the same RAM as the device tier.",
    )


class DiskConfig(_Section):
    """The last tier: a store on a local SSD."""

    section = "disk"
    path: _Folder = Field(
        default=Path("~/.cache/tierkv"),
        description="Folder of the store; made when it is missing. A relative path starts at the working directory.",
    )
    capacity: _AnySize = Field(
        default=parse_size("100GiB"),
        description="Bytes of allocated files, bookkeeping included. 0 turns the tier off. Left at the default it "
        "takes at most 40% of what is free.",
    )
    readers: int = Field(default=2, ge=1, le=64, description="Threads that read from the store.")
    write_batch: int = Field(default=16, ge=1, le=4096, description="Blocks written in one transaction.")
    write_queue: _RealSize = Field(
        default=parse_size("256MiB"),
        description="Bytes of RAM that may wait to be written. When it is full, copies are skipped, decoding goes on.",
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
    layers_ahead: int = Field(
        default=2, ge=0, description="Layers ahead of need that cold blocks are fetched. 0: none."
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
        description="Blocks below the device. stream: through staging buffers. compute: attention on the CPU where "
        "they lie. promote: move them up for good. auto: by measured bandwidth.",
    )


class PrefixConfig(_Section):
    """Reuse of KV between prompts that begin alike."""

    section = "prefix"
    share: bool = Field(default=True, description="Share the blocks of equal prefixes in memory, within one engine.")
    persist: bool = Field(default=False, description="Keep prefixes on disk. This writes token ids and wears the SSD.")
    write_policy: Literal["always", "second_sighting", "never"] = Field(
        default="second_sighting", description="When a prefix is written to disk."
    )
    min_tokens: int = Field(default=256, ge=0, description="Shorter prefixes, in tokens, are not kept.")
    eviction: Literal["lru", "s3fifo", "cost"] = Field(
        default="lru",
        description="Which kept prefix goes first: least recently used, scan-resistant, or cheapest to recompute.",
    )
    ttl_seconds: int = Field(
        default=0, ge=0, description="Seconds after which a kept prefix is forgotten. 0: no limit."
    )
    salt: _Text = Field(
        default="", description="Prefixes are shared only between equal salts: give each tenant its own."
    )


class CacheConfig(_Section):
    """Every setting of tierkv: frozen, hashable, checked on construction. The key names are a contract.

    Sizes are given as in a file: ``DeviceConfig(capacity=parse_size("4GiB"))``, or ``load_config({"device":
    {"capacity": "4GiB"}})``, which also heeds the environment.

    Raises:
        ConfigError: a key is unknown, or a value is not legal or cannot be honoured by this version.
    """

    block_size: _BlockSize = Field(
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
        return {key: self.value(key) for key in _FIELDS if self.is_explicit(key)}

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

    def as_toml(self) -> str:
        """Return a tierkv.toml with every key explained; a key that was not set is commented out, as its default.

        Reading it back gives an equal config in which the same keys are set.
        """
        lines, section = _comment(_TOML_HEADER), ""
        for key, field in _FIELDS.items():
            parent, _, name = key.rpartition(".")
            if parent != section:
                section = parent
                lines += ["", f"[{section}]", *_comment(_SECTIONS[section].__doc__ or "")]
            later = (
                f" Not in this version: {_either([show(value) for value in NOT_YET[key]])}." if key in NOT_YET else ""
            )
            lines += ["", *_comment(f"{field.description} Legal: {_legal(key)}.{later}")]
            lines += [f"{'' if self.is_explicit(key) else '#'}{name} = {show(self.value(key), longest=None)}"]
        return "\n".join(lines) + "\n"

    def value(self, key: str) -> Any:
        """Return the value of a key by its dotted name."""
        section, _, name = key.rpartition(".")
        return getattr(getattr(self, section) if section else self, name)


_SECTIONS: Final[Mapping[str, type[_Section]]] = {
    name: field.annotation
    for name, field in CacheConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, _Section)
}
_FIELDS: Final[Mapping[str, FieldInfo]] = {
    **{name: field for name, field in CacheConfig.model_fields.items() if name not in _SECTIONS},
    **{f"{name}.{key}": field for name, model in _SECTIONS.items() for key, field in model.model_fields.items()},
}
_VARIABLES: Final = {f"{_PREFIX}{key.replace('.', '__').upper()}": key for key in _FIELDS}
_TOML_HEADER: Final = (
    "tierkv.toml: every key of tierkv with its meaning and its default. Remove the # in front of a key to set it. "
    f"Sizes: {LEGAL_SIZES} when the engine is made. A value that is set must fit on the machine or is refused; a "
    "default adapts. Each key can also be set in the environment: TIERKV_BLOCK_SIZE=64, TIERKV_DEVICE__CAPACITY=4GiB."
)


def default_toml() -> str:
    """Return a tierkv.toml that explains every key and, with all of them commented out, sets none."""
    return CacheConfig().as_toml()


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
    origin = ""
    if source is None and environ.get("TIERKV_CONFIG"):
        source, origin = environ["TIERKV_CONFIG"], " (from TIERKV_CONFIG)"
    if source is None:
        values = {}
    elif isinstance(source, Mapping):
        values, origin = _plain(source), "configuration mapping"
    elif isinstance(source, str | os.PathLike):
        origin = show(Path(source), longest=200).strip('"') + origin
        values = _read_toml(Path(source), origin)
    else:
        raise ConfigError(f"a configuration is a path, a mapping, a CacheConfig or None, not {type(source).__name__}")
    origins: dict[str, str] = {}
    unknown = []
    for name in sorted(name for name in environ if name.startswith(_PREFIX) and name not in OTHER_ENVIRONMENT):
        if name in _VARIABLES:
            _set(values, _VARIABLES[name], _environment_value(_VARIABLES[name], environ[name]))
            origins[_VARIABLES[name]] = name
        else:
            unknown.append(_unknown_variable(name))
    return _build(values, origins, origin, unknown)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What the tiers may take on this machine, in bytes.

    Attributes:
        device: bytes of the device tier, at least 1.
        host: bytes of the host tier, 0 where it is off.
        disk: bytes of allocated files of the disk tier, 0 where it is off.
        write_queue: bytes of RAM that may wait to be written to disk, 0 where the disk tier is off.
        disk_path: absolute folder of the store, or None where the disk tier is off.
        notes: one sentence for each default that had to adapt.
    """

    device: int
    host: int
    disk: int
    write_queue: int
    disk_path: Path | None
    notes: tuple[str, ...] = ()


def resolve(
    config: CacheConfig, *, cuda: bool, free_device_bytes: int, free_ram_bytes: int, free_disk_bytes: int | None
) -> Budgets:
    """Return what a config comes to where this much is free.

    A value that was set gets exactly what it says or is refused. A default adapts, with a note. Everything that lies
    in RAM is checked together: the host tier, the write queue and, without CUDA, the device tier.

    Args:
        config: the checked configuration.
        cuda: whether the device is a GPU. Otherwise its memory is RAM, and ``free_device_bytes`` is not looked at.
        free_device_bytes: free memory of the GPU; of the fullest where there are several.
        free_ram_bytes: free RAM, as ``free_memory`` returns it.
        free_disk_bytes: free space for the store, *what it occupies already included*, or None where that is unknown.

    Raises:
        ConfigError: something that was set does not fit, or nothing is left for the device tier.
    """
    device, disk = (
        Claim(key, config.value(key), config.is_explicit(key)) for key in ("device.capacity", "disk.capacity")
    )
    queue = Claim("disk.write_queue", config.disk.write_queue, config.is_explicit("disk.write_queue"))
    host = Claim("host.capacity", _HOST_AUTO, is_explicit=False, share_percent=50)
    if isinstance(config.host.capacity, Size):
        host = Claim("host.capacity", config.host.capacity, is_explicit=True)
    elif not cuda:
        host = Claim("host.capacity", Size(0), is_explicit=True)

    where = f"disk space at {config.disk.path}"
    if free_disk_bytes is not None:
        granted, notes = fit([disk], free_disk_bytes, where)
    elif disk.size.percent is None:
        granted, notes = {disk.key: disk.size.size_bytes}, []
    else:
        raise ConfigError(f"{disk.key} = {show(disk.size)} has no meaning here: the {where} is unknown (legal: bytes)")
    ram = [host, queue] if granted[disk.key] else [host]
    shares = (([device], free_device_bytes, "device memory"), (ram, free_ram_bytes, "RAM"))
    for claims, free_bytes, what in shares if cuda else (([device, *ram], free_ram_bytes, "RAM"),):
        more, more_notes = fit(claims, free_bytes, what)
        granted |= more
        notes += more_notes
        if granted[device.key] < 1:
            taken = f" and other keys take {format_bytes(sum(more.values()))} of it" if any(more.values()) else ""
            raise ConfigError(f"device.capacity gets nothing: {format_bytes(free_bytes)} of {what} is free{taken}")
    return Budgets(
        device=granted["device.capacity"],
        host=granted["host.capacity"],
        disk=granted["disk.capacity"],
        write_queue=granted.get("disk.write_queue", 0),
        disk_path=_absolute(config.disk.path) if granted["disk.capacity"] else None,
        notes=tuple(notes),
    )


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"disk.path = {show(path)} is in an unknown home folder (legal: the path of a folder)"
        ) from None


def _build(values: dict[str, Any], origins: Mapping[str, str], origin: str, unknown: Sequence[str] = ()) -> CacheConfig:
    """Validate ``values``, or raise everything that is wrong at once.

    Keys come from ``origin`` unless ``origins`` says otherwise; ``unknown`` holds complaints about variables.
    """
    problems: dict[str, list[str]] = {}  # by where they come from
    config = None
    try:
        config = CacheConfig.model_validate(values)
    except ValidationError as error:
        for key, text in _problems(error):
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


def _read_toml(path: Path, origin: str) -> dict[str, Any]:
    try:
        text = path.expanduser().read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except FileNotFoundError:
        raise ConfigError(f"{origin}: no such file") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{origin}: cannot be read: {reason}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        where = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end of the file")
        raise ConfigError(f"{origin}: not valid TOML: {' '.join(where.split())}") from None


def _environment_value(key: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    is_text = _FIELDS[key].annotation in {str, Path}  # so that SALT=123 needs no quotes within quotes
    return text if len(parsed) > 1 or (is_text and not isinstance(value, str)) else value


def _problems(error: ValidationError, section: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it and what would be legal) for everything that pydantic found."""
    for details in error.errors(include_url=False):
        names = [*([section] if section else []), *map(str, details["loc"])]
        key, value = ".".join(names), details["input"]
        if details["type"] == "extra_forbidden":
            yield key, _unknown_key(names, value)
        elif key in _SECTIONS:
            yield key, f"{key} = {show(value)} is not possible: {key} is a section, write [{key}] with its keys below"
        elif details["type"] == "value_error":
            yield key, f"{key} = {details['ctx']['error']}"
        else:
            yield key, f"{key} = {show(value)} is not possible (legal: {_legal(key)})"


def _legal(key: str) -> str:
    """Return what a key may be set to, from the type and bounds of its field."""
    field = _FIELDS[key]
    said = {
        name: value
        for m in field.metadata
        for name in ("text", "ge", "le")
        if (value := getattr(m, name, None)) is not None
    }
    if "text" in said:
        return str(said["text"])
    if field.annotation is int:
        return f"a whole number from {said['ge']}" + (f" to {said['le']}" if "le" in said else " up")
    if field.annotation is str:
        return "text"
    choices = (False, True) if field.annotation is bool else get_args(field.annotation)
    return _either([show(choice) for choice in choices if choice not in NOT_YET.get(key, ())])


def _unknown_key(names: list[str], value: object) -> str:
    shown = ".".join(name if _BARE_KEY.fullmatch(name) else show(name) for name in names)  # as TOML would spell it
    sections = [f"[{name}]" for name in _SECTIONS]
    if len(names) == 1 and isinstance(value, Mapping):
        return (
            f"unknown section [{shown}] ({_suggest(get_close_matches(f'[{names[0].lower()}]', sections, 1), sections)})"
        )
    siblings = [known for known in _FIELDS if known.startswith(f"{names[0]}.")]
    return f"unknown key {shown} ({_suggest(_nearest('.'.join(names)), siblings or ['block_size', *sections])})"


def _unknown_variable(name: str) -> str:
    near = _nearest(name.removeprefix(_PREFIX).lower().replace("__", "."))
    names = [variable for variable, key in _VARIABLES.items() if key in near]
    names = names or get_close_matches(name, OTHER_ENVIRONMENT, 1, 0.8)
    return f"unknown variable {show(name, longest=None)[1:-1]} ({_suggest(names, [*_VARIABLES])})"


def _nearest(key: str) -> list[str]:
    """Return the known keys that a misspelt or misplaced one most likely means, or none."""
    section, _, name = key.rpartition(".")
    name = name.lower().replace("-", "_").removeprefix(_PREFIX.lower()).replace("__", ".")
    leaf = name.rpartition(".")[2]
    names = {known: known.rpartition(".")[2] for known in _FIELDS}
    here = {names[known]: known for known in _FIELDS if known.rpartition(".")[0] == section}
    return (
        [known for known in _FIELDS if known in {name, f"{section}.{name}"}]
        or [known for known in _FIELDS if names[known] == leaf or known.rpartition(".")[0] == name]
        or [here[near] for near in get_close_matches(leaf, here, 1)]
        or get_close_matches(f"{section}.{name}".lstrip("."), _FIELDS, 1, 0.8)
        or [known for known in _FIELDS if names[known] in get_close_matches(leaf, names.values(), 1)]
    )


def _suggest(near: list[str], known: list[str]) -> str:
    return f"did you mean {_either(near)}?" if near else f"known: {', '.join(known)}"


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
