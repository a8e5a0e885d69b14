"""The rows of a run, kept as they come: one JSON object a line, safe on disk before the next sample begins.

DIR/settings.json   what was asked for
DIR/rows.jsonl      the rows; a last line that a crash has torn is dropped when the run goes on
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from tierkv.benchmarks.longcontext_settings import REFERENCE, differences
from tierkv.errors import ConfigError

SETTINGS_FILE: Final = "settings.json"
ROWS_FILE: Final = "rows.jsonl"
_ADVICE: Final = "give --out another folder"

Row = dict[str, Any]


class Key(NamedTuple):
    """Which row it is."""

    cache: str
    length: int
    task: str
    sample: int


def key_of(row: Mapping[str, Any]) -> Key:
    """Return which row this is."""
    return Key(row["cache"], row["length"], row["task"], row["sample"])


class RowLog:
    """The rows of one folder. While it is open, no other run writes to them. Use as a context manager.

    Attributes:
        rows: all that are kept, by key, in the order in which they came.
    """

    def __init__(self, folder: Path, record: Mapping[str, Any], *, resume: bool) -> None:
        """Make or go on with the rows of a folder.

        Args:
            folder: is made where it is missing.
            record: the settings of the run, as JSON.
            resume: go on with rows that are there.

        Raises:
            ConfigError: the folder cannot be written to, is in use, or holds rows of another run or of one that was not
                to be resumed.
        """
        self.folder = folder
        self.rows: dict[Key, Row] = {}
        self._file = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / ROWS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"--out {folder}: {why}; give a folder that can be written to") from None
        try:
            self._begin(record, resume=resume)
        except BaseException:
            self.close()
            raise

    def append(self, row: Row) -> None:
        """Keep a row. It is on the disk when this returns.

        Raises:
            ValueError: the row is there already.
            OSError: it cannot be written.
        """
        key = key_of(row)
        if key in self.rows:
            raise ValueError(f"row {key} is kept already")
        line = memoryview((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self.rows[key] = row

    def close(self) -> None:
        """Let others write to the folder. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, record: Mapping[str, Any], *, resume: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--out {self.folder}: another run is writing to it; wait for it, or {_ADVICE}") from None
        if os.fstat(self._file).st_size and not resume:
            raise ConfigError(
                f"--out {self.folder} holds rows of another run; go on with it with --resume, or {_ADVICE}"
            )
        kept = _read_settings(self.folder)
        if kept is None:
            if os.fstat(self._file).st_size:
                raise ConfigError(
                    f"--out {self.folder} holds rows and no {SETTINGS_FILE} that says of what run; {_ADVICE}"
                )
            _write_settings(self.folder, record)
        elif os.fstat(self._file).st_size == 0:
            _write_settings(self.folder, record)  # nothing was run with the old ones
        elif different := differences(kept, record):
            raise ConfigError(
                f"--out {self.folder} cannot be resumed with other settings: {'; '.join(different)}; give the same, or "
                f"{_ADVICE}"
            )
        self._read_rows()

    def _read_rows(self) -> None:
        data = (self.folder / ROWS_FILE).read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        os.lseek(self._file, whole, os.SEEK_SET)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                key = key_of(row)
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{self.folder / ROWS_FILE}, line {number}: is no row of a run; remove the line, or {_ADVICE}"
                ) from None
            if key in self.rows:
                raise ConfigError(
                    f"{self.folder / ROWS_FILE}, line {number}: the row is there twice; remove the line, or {_ADVICE}"
                )
            self.rows[key] = row


def compare(row: Row, rows: Mapping[Key, Row]) -> None:
    """Note in a row how its tokens agree with the reference's, where both are there.

    Sets ``agreement`` (share of equal tokens, by position) and ``first_difference`` (the first position that differs).
    """
    row["agreement"] = row["first_difference"] = None
    reference = rows.get(Key(REFERENCE, row["length"], row["task"], row["sample"]))
    if row["cache"] == REFERENCE or reference is None or row["error"] or reference["error"]:
        return
    row["agreement"], row["first_difference"] = agreement(reference["tokens"], row["tokens"])


def agreement(expected: Sequence[int], found: Sequence[int]) -> tuple[float, int | None]:
    """Return which share of tokens is equal, position by position, and the first position that is not."""
    longest = max(len(expected), len(found))
    if not longest:
        return 1.0, None
    same = [one == other for one, other in zip(expected, found, strict=False)]
    first = None if len(same) == longest and all(same) else (same.index(False) if not all(same) else len(same))
    return sum(same) / longest, first


def _read_settings(folder: Path) -> dict[str, Any] | None:
    path = folder / SETTINGS_FILE
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {_ADVICE}") from None
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise ConfigError(f"{path} holds no settings of a run; {_ADVICE}")
    return kept


def _write_settings(folder: Path, record: Mapping[str, Any]) -> None:
    path = folder / SETTINGS_FILE
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}; give a folder that can be written to") from None
    finally:
        beside.unlink(missing_ok=True)
