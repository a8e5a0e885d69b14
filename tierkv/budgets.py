"""Budgets: the bytes that a configuration comes to on this machine, or why they do not fit.

resolve(config, what is free)  ->  Budgets: bytes of each tier
fit(claims, free, what)        ->  bytes for each claim: as asked for, adapted where it is a default, or an error
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tierkv.config import CacheConfig
from tierkv.config_fields import LEGAL_FOLDERS
from tierkv.errors import ConfigError
from tierkv.sizes import Size, format_bytes, parse_size, show

_HOST_AUTO: Final = parse_size("16GiB")


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
    if config.is_explicit("disk.path") and not disk.is_explicit and not granted[disk.key]:
        # A folder that was set is meant to be used; a default that finds no room is done without.
        advice = "give another folder, or set disk.capacity = 0 to do without"
        raise ConfigError(f"disk.path = {show(config.disk.path)} has no free space; {advice}")
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


class Claim(NamedTuple):
    """What one key of a configuration asks of a shared resource.

    Attributes:
        key: the key's dotted name, for messages and results.
        size: how much it asks for.
        is_explicit: whether a person set it; otherwise it is a default, which adapts.
        share_percent: the most that a default takes of what the claims before it left.
    """

    key: str
    size: Size
    is_explicit: bool
    share_percent: int = 40


def fit(claims: Sequence[Claim], free_bytes: int, what: str) -> tuple[dict[str, int], list[str]]:
    """Return the bytes that each claim gets, by key, and a note for each default that had to adapt.

    Explicit claims get exactly what they ask for. Defaults share what those leave, in the order given.

    Args:
        claims: who shares the resource.
        free_bytes: how much there is.
        what: the resource's name, for messages: ``"RAM"``.

    Raises:
        ConfigError: the explicit claims alone need more than there is.
    """
    free_bytes = max(0, free_bytes)
    granted = {claim.key: claim.size.resolve(free_bytes) for claim in claims if claim.is_explicit}
    if sum(granted.values()) > free_bytes:
        asked = " + ".join(
            f"{claim.key} = {show(claim.size)}"
            + (f" ({format_bytes(granted[claim.key])})" if claim.size.percent else "")
            for claim in claims
            if granted.get(claim.key)
        )
        raise ConfigError(
            f"{asked} does not fit: {format_bytes(free_bytes)} of {what} is free "
            f'(legal: up to {format_bytes(free_bytes)}, a share such as "40%", or no value for what fits)'
        )
    notes = []
    for claim in claims:
        if not claim.is_explicit:
            left = free_bytes - sum(granted.values())
            wanted = claim.size.resolve(free_bytes)
            granted[claim.key] = min(wanted, left * claim.share_percent // 100)
            if granted[claim.key] < wanted:
                notes.append(
                    f"{claim.key} is {format_bytes(granted[claim.key])} instead of the default {claim.size}: at most "
                    f"{claim.share_percent}% of the {format_bytes(left)} of {what} that is left"
                )
    return granted, notes


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"disk.path = {show(path)} is in an unknown home folder (legal: {LEGAL_FOLDERS})") from None
