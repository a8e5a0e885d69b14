"""One HTML file with tables and charts that can be put in front of a colleague: nothing to install, nothing to fetch.

    page = Page("tierkv plan: Llama-3.1-8B on H100", lead="131,072 bytes a token; 40 sessions fit.")
    page.facts({"model": "Llama-3.1-8B", "machine": "H100"})
    page.section("Where the bytes go")
    page.table(["tier", "bytes"], [["device", "12GiB"]])
    page.plot(chart, caption="What it shows.")          # from tierkv.charts
    page.note("reproduce", "tierkv plan --model llama-3.1-8b --profile h100")
    page.write("out.html")

Importing this loads no library; ``Page`` needs the extra ``report``. The file holds its style, its one script and its
pictures, and forbids the browser to load anything else. Whatever text it is given appears as text.
"""

import base64
import hashlib
import importlib.util
import numbers
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tierkv.charts_data import Cell, Chart, Number
from tierkv.charts_units import MISSING, address, format_value, plain, storable
from tierkv.errors import ConfigError
from tierkv.sizes import show

if TYPE_CHECKING:
    from tierkv.charts_draw import Picture

_NEEDED: Final = ("jinja2", "matplotlib")
_ADVICE: Final = "give the name of a file in a folder where you may write"
_NOTHING: Final = "\N{EN DASH}"
_CONTENTS_FROM: Final = 4
_SIDES: Final = {"l": "left", "r": "right", "c": "center"}
_NUMERIC: Final = re.compile(r"[-+−±~<>≤≥]{0,2}\s?(\d[\d.,]*|∞)([eE][-+]?\d+)?(\s?[A-Za-zµ%×/]{1,9})?")  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class _Facts:
    pairs: tuple[tuple[str, str], ...]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True, slots=True)
class _Table:
    columns: tuple[str, ...]
    sides: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str
    kind: Literal["table"] = "table"


@dataclass(frozen=True, slots=True)
class _Figure:
    number: int
    chart: Chart
    data: _Table
    caption: str
    kind: Literal["figure"] = "figure"


@dataclass(frozen=True, slots=True)
class _Note:
    label: str
    text: str
    kind: Literal["note"] = "note"


@dataclass(slots=True)
class _Section:
    title: str
    paragraphs: list[str]
    anchor: str
    blocks: list[_Facts | _Table | _Figure | _Note] = field(default_factory=list)


class Page:
    """A page that is filled from top to bottom and then written.

    Args:
        title: the heading, and the name of the browser's tab.
        lead: one to three sentences under it: the result, in numbers.
        footer: the last line: what wrote the page, and when.

    Raises:
        ConfigError: the libraries of the extra ``report`` are not installed.
    """

    def __init__(self, title: str, *, lead: str = "", footer: str = "") -> None:
        _check_libraries()
        self.title = plain(title)
        self._lead = plain(lead)
        self._footer = plain(footer)
        self._sections = [_Section("", [], "")]
        self._figures = 0

    def section(self, title: str, text: str = "") -> None:
        """Begin a section; what follows is in it.

        Args:
            title: its heading.
            text: its first paragraphs; an empty line separates them.
        """
        paragraphs = [plain(part) for part in re.split(r"\n\s*\n", text) if part.strip()]
        anchor = "-".join(filter(None, ("section", str(len(self._sections)), address(title))))
        self._sections.append(_Section(plain(title), paragraphs, anchor))

    def facts(self, facts: Mapping[str, Cell]) -> None:
        """Add a list of names and what they are: what was run, on what."""
        self._add(_Facts(tuple((plain(name), _text(value)) for name, value in facts.items())))

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, caption: str = "", align: str | None = None
    ) -> None:
        """Add a table; the first column names the rows.

        Args:
            columns: headings.
            rows: cells: text, numbers, ``tierkv.charts.Number`` for one with a unit, or None for nothing.
            caption: what it shows.
            align: a letter a column: l, r or c. Without it, columns of numbers are on the right.

        Raises:
            ValueError: a row has another number of cells than there are columns, or ``align`` does not fit.
        """
        self._add(_table(columns, rows, caption, align))

    def plot(self, chart: Chart, *, caption: str = "") -> None:
        """Add a chart, with its numbers as a table that opens.

        Args:
            chart: made by a function of ``tierkv.charts``.
            caption: what it shows, and how to read it.
        """
        self._figures += 1
        self._add(_Figure(self._figures, chart, _table(chart.columns, chart.rows, "", None), plain(caption)))

    def note(self, label: str, text: str) -> None:
        """Add a command line, or other text to be copied as it is, with a button that does so.

        Args:
            label: what it is.
            text: of one or more lines.
        """
        self._add(_Note(plain(label), storable(text).strip("\n")))

    def html(self) -> str:
        """Return the page. The same content gives the same text."""
        import jinja2
        from markupsafe import Markup

        from tierkv.charts_draw import draw
        from tierkv.charts_svg import palette

        # Finished, so that a template cannot mistake a picture for text, nor text for a picture.
        def picture(figure: _Figure) -> "Picture | None":
            return draw(figure.chart, f"fig{figure.number}")

        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters.update(cell=_text, svg=Markup, digest=_digest)
        environment.tests["number"] = lambda cell: isinstance(cell, Number)
        template = environment.from_string(files("tierkv").joinpath("page.html").read_text(encoding="utf-8"))
        named = [section for section in self._sections if section.title]
        return template.render(
            title=self.title,
            palette=palette(),
            lead=self._lead,
            footer=self._footer,
            sections=self._sections,
            contents=named if len(named) >= _CONTENTS_FROM else [],
            picture=picture,
        )

    def write(self, path: str | Path) -> None:
        """Write the page to a file, whole or not at all.

        Raises:
            ConfigError: the file cannot be written; one line says why.
        """
        target = _target(path)
        text = self.html()
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            try:
                beside.write_text(text, encoding="utf-8")
                beside.replace(target)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from None

    def write_plots(self, folder: str | Path) -> list[Path]:
        """Write every plot to a file of its own, ``NUMBER-TITLE.svg``, for use elsewhere; return the files.

        Args:
            folder: made if it is missing; plots of a page that was there before are removed.

        Raises:
            ConfigError: a file cannot be written; one line says why.
        """
        from tierkv.charts_file import write_files

        blocks = [block for section in self._sections for block in section.blocks]
        charts = {block.number: block.chart for block in blocks if isinstance(block, _Figure)}
        try:
            return write_files(Path(folder), charts)
        except OSError as error:
            raise _unwritable(folder, error.strerror or str(error)) from None

    @staticmethod
    def check_writable(path: str | Path) -> None:
        """Find out before long work whether a page can be written to a file; its folder must exist.

        Raises:
            ConfigError: it cannot, or the libraries that make the page are not installed; one line says why.
        """
        _check_libraries()
        target = _target(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.touch()
            beside.unlink()
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from None

    def _add(self, block: _Facts | _Table | _Figure | _Note) -> None:
        self._sections[-1].blocks.append(block)


def _check_libraries() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        raise ConfigError(f'a report page needs {needs}; install the extra with pip install "tierkv-cache[report]"')


def _target(path: str | Path) -> Path:
    """Return the file that is to be written, behind links.

    Raises:
        ConfigError: a file cannot be there.
    """
    if not str(path):
        raise ConfigError(f"the report has an empty file name; {_ADVICE}")
    try:
        target = Path(path).resolve(strict=False)
        if not target.parent.exists():
            raise _unwritable(path, "its folder does not exist")
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise _unwritable(path, "it is a folder" if target.is_dir() else "it is no regular file")
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None
    except RuntimeError:  # what Python 3.11 makes of it
        raise _unwritable(path, "its links go round in circles") from None
    except ConfigError:
        raise
    except ValueError:
        raise _unwritable(path, "its name has a character that no file name can have") from None
    return target


def _unwritable(path: str | Path, why: str) -> ConfigError:
    return ConfigError(f"the report {show(str(path), None)} cannot be written: {why}; {_ADVICE}")


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str, align: str | None) -> _Table:
    kept = tuple(tuple(row) for row in rows)
    for number, row in enumerate(kept, 1):
        if len(row) != len(columns):
            raise ValueError(f"row {number} of a table has {len(row)} cells; give {len(columns)}, one a column")
    if align is None:
        align = "".join("r" if _is_numeric([row[at] for row in kept]) else "l" for at in range(len(columns)))
    if len(align) != len(columns) or set(align) - set(_SIDES):
        raise ValueError(f"{align!r} does not align {len(columns)} columns (legal: a letter a column, of l, r and c)")
    return _Table(tuple(map(plain, columns)), tuple(_SIDES[letter] for letter in align), kept, plain(caption))


def _is_numeric(cells: Sequence[Cell]) -> bool:
    """Return whether all cells that hold something hold numbers, with or without a unit."""
    texts = [text for cell in cells if (text := _text(cell)) not in ("", _NOTHING, MISSING)]
    return bool(texts) and all(_NUMERIC.fullmatch(text) for text in texts)


def _text(cell: Cell) -> str:
    """Return what a cell shows."""
    if cell is None:
        return _NOTHING
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, numbers.Integral):
        return f"{int(cell):,}"
    if isinstance(cell, numbers.Real):
        return format_value(float(cell), "number")
    return plain(cell)


def _digest(script: str) -> str:
    """Return the name by which a page's security policy admits its own script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
