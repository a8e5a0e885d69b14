"""What one setting may hold: the types of fields with a rule of their own, and how each rule is worded."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, PlainValidator

from tierkv.errors import ConfigError
from tierkv.sizes import LEGAL_SIZES, Size, parse_size, show

_BLOCK_SIZES: Final = "16, 32, 64, 128, 256 or 512"
_COUNTS: Final = '"auto", or a whole number from 0 up'
LEGAL_FOLDERS: Final = "the path of a folder"


@dataclass(frozen=True)
class Legal:
    """What is legal for a field, where its type and bounds do not say it."""

    text: str


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is not possible (legal: {_BLOCK_SIZES})")
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
        raise ValueError(f"{show(value)} is not possible (legal: {LEGAL_FOLDERS})")
    return Path(value)


def _utf8(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{show(value)} is not possible: it is not Unicode (legal: text)")
    return value


def _count_or_auto(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if type(value) is not int or value < 0:
        raise ValueError(f"{show(value)} is not possible (legal: {_COUNTS})")
    return value


Text = Annotated[str, AfterValidator(_utf8)]
BlockSize = Annotated[int, Field(ge=16, le=512), AfterValidator(_power_of_two), Legal(_BLOCK_SIZES)]
AnySize = Annotated[Size, PlainValidator(parse_size), Legal(LEGAL_SIZES)]
RealSize = Annotated[Size, PlainValidator(_above_zero), Legal(f"{LEGAL_SIZES}; more than 0")]
AutoSize = Annotated[Size | Literal["auto"], PlainValidator(_size_or_auto), Legal(f'"auto", {LEGAL_SIZES}')]
Folder = Annotated[Path, PlainValidator(_folder), Legal(LEGAL_FOLDERS)]
LayersAhead = Annotated[int | Literal["auto"], PlainValidator(_count_or_auto), Legal(_COUNTS)]
