"""What a run of ``tierkv bench longcontext`` is asked for, as it is kept beside its rows and compared on a resume."""

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import tierkv
from tierkv.errors import ConfigError
from tierkv.sizes import show

REFERENCE: Final = "dynamic"
"""The cache whose tokens are the measure of all others'."""
LOSSY: Final = "quantized"
CACHES: Final = (REFERENCE, "static", LOSSY, "offloaded", "tierkv")
"""Those that have a name of their own; ``tierkv:FILE.toml`` is tierkv with a configuration."""
TIERED: Final = "tierkv"
_FILE_MARK: Final = f"{TIERED}:"
JSONL: Final = ".jsonl"
"""How the name of a task ends that is a file of prompts and answers."""

EXACT_DTYPE: Final = "float32"
"""In this dtype the tokens of every exact cache must be the reference's."""
_PACKAGES: Final = ("torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides which rows there are, and what they may be compared with.

    Attributes:
        model: as ``load_model`` takes it.
        dtype: of the model and of K and V.
        lengths: tokens, answers included, ascending.
        tasks: names of tasks, and of files that end in ``.jsonl``.
        caches: the reference first.
        samples: of each task at each length.
        seed: of the samples.
        max_new_tokens: the most tokens of an answer; None leaves it to the task.
    """

    model: str
    dtype: str
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    caches: tuple[str, ...]
    samples: int
    seed: int
    max_new_tokens: int | None = None

    @property
    def must_match(self) -> bool:
        """Whether exact caches have to give the reference's tokens."""
        return self.dtype == EXACT_DTYPE

    def record(self) -> dict[str, Any]:
        """Return plain JSON: what was asked for, what is in the files it names, and what runs it.

        Raises:
            ConfigError: a file cannot be read.
        """
        files = [path for path in map(config_file, self.caches) if path] + [
            task for task in self.tasks if task.endswith(JSONL)
        ]
        return {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()},
            "files": {name: _digest(name) for name in files},
            "versions": _versions(),
            "machine": {"cores": os.cpu_count(), "architecture": platform.machine()},
        }


def is_exact(cache: str) -> bool:
    """Whether a cache promises the tokens of the reference."""
    return cache != LOSSY


def config_file(cache: str) -> str | None:
    """Return the file in ``tierkv:FILE.toml``; None for any other cache."""
    return cache.removeprefix(_FILE_MARK) if cache.startswith(_FILE_MARK) else None


def is_tiered(cache: str) -> bool:
    """Whether a cache is tierkv's."""
    return cache == TIERED or cache.startswith(_FILE_MARK)


def differences(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Say what differs between the settings of two runs, in words."""
    found = []
    for name in dict.fromkeys([*kept, *asked]):
        one, other = kept.get(name), asked.get(name)
        if one == other:
            continue
        if name == "files":
            names = list(dict.fromkeys([*(one or {}), *(other or {})]))
            changed = [file for file in names if (one or {}).get(file) != (other or {}).get(file)]
            found.append(f"the content of {', '.join(changed)}")
        else:
            found.append(f"{name} was {_words(one)} and is {_words(other)}")
    return found


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(map(str, value)) or "nothing"
    return "not set" if value is None else str(value)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "tierkv": tierkv.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _digest(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{show(name, None)}: cannot be read: {error.strerror}; give a file that can") from None
