"""The exception tree.

    TierKVError
    ├── ConfigError          a setting is unknown, of the wrong type or impossible      (also a ValueError)
    ├── UnsupportedModel     a model or cache that cannot be tiered, and why            (also a ValueError)
    ├── UnsafeCall           a call that would give wrong tokens, refused               (also a ValueError)
    ├── CapacityError        the tiers together cannot hold what was asked for          (also a MemoryError)
    ├── ClosedError          an engine or cache used after close, or after fork()       (also a RuntimeError)
    ├── TornForward          a forward was interrupted and cannot be rolled back        (also a RuntimeError)
    ├── BlockLost            the only copy of a live block cannot be read back          (also a RuntimeError)
    ├── TransferTimeout      a copy did not finish within the bounded wait              (also a TimeoutError)
    └── StoreError           a store could not do what it was asked                     (also an OSError)
        ├── StoreFull        no room left in the store or on its file system
        └── RecordError      a record is missing, damaged, or not the one asked for

Every message is one line that says what is wrong, what would be legal, and what to do.
"""


class TierKVError(Exception):
    """Base of every error that tierkv raises on purpose."""


class ConfigError(TierKVError, ValueError):
    """A setting is unknown, of the wrong type or impossible."""


class UnsupportedModel(TierKVError, ValueError):
    """A model, dtype or cache type that tierkv cannot tier."""


class UnsafeCall(TierKVError, ValueError):
    """A call that would silently produce wrong tokens; refused before it runs."""


class CapacityError(TierKVError, MemoryError):
    """The configured tiers together cannot hold what was asked for."""


class ClosedError(TierKVError, RuntimeError):
    """An engine or cache was used after it was closed, or in a forked child."""


class TornForward(TierKVError, RuntimeError):
    """A forward was interrupted and some layer of the cache cannot be rolled back."""


class BlockLost(TierKVError, RuntimeError):
    """The only copy of a live block cannot be read back; its tokens must be computed again."""


class TransferTimeout(TierKVError, TimeoutError):
    """A copy did not finish within the bounded wait."""


class StoreError(TierKVError, OSError):
    """A store could not do what it was asked."""


class StoreFull(StoreError):
    """No room is left in the store or on its file system."""


class RecordError(StoreError):
    """A record is missing, damaged, or not the one that was asked for."""
