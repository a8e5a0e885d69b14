"""The tiers, from the fastest down, and the wires between them."""

from enum import IntEnum
from typing import NamedTuple


class Tier(IntEnum):
    """Where a copy of a block lies. A smaller value is a higher (faster) tier."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        """The tier's name in reports and in the configuration file."""
        return self.name.lower()


class Wire(NamedTuple):
    """A direction in which bytes move."""

    source: Tier
    destination: Tier

    @property
    def label(self) -> str:
        """The wire's name in reports, for example ``device_to_host``."""
        return f"{self.source.label}_to_{self.destination.label}"


class Run(NamedTuple):
    """Physically adjacent slots of one tier that hold consecutive blocks of a sequence."""

    slot: int
    length: int
