"""What is said about a mistake in a configuration: what is wrong, what is legal, which key was probably meant."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tierkv.config_sources import OTHER_ENVIRONMENT, PREFIX, variable
from tierkv.sizes import show

_BARE_KEY: Final = re.compile("[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Wording:
    """Words the mistakes that can be made with a set of keys, each on one line.

    Attributes:
        fields: the keys, by dotted name.
        sections: the names of the sections.
    """

    fields: Mapping[str, FieldInfo]
    sections: Collection[str]

    def problems(self, error: ValidationError, section: str = "") -> Iterator[tuple[str, str]]:
        """Yield (key, what is wrong with it and what would be legal) for everything that pydantic found."""
        for details in error.errors(include_url=False):
            names = [*([section] if section else []), *map(str, details["loc"])]
            key, value = ".".join(names), details["input"]
            if details["type"] == "extra_forbidden":
                yield key, self._unknown_key(names, value)
            elif key in self.sections:
                text = f"is not possible: {key} is a section, write [{key}] with its keys below"
                yield key, f"{key} = {show(value)} {text}"
            elif details["type"] == "value_error":
                yield key, f"{key} = {details['ctx']['error']}"
            else:
                yield key, f"{key} = {show(value)} is not possible (legal: {self.legal(key)})"

    def legal(self, key: str) -> str:
        """Return what a key may be set to, from the type and bounds of its field."""
        field = self.fields[key]
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
        return either([show(choice) for choice in choices])

    def unknown_variable(self, name: str) -> str:
        """Return what is said about a variable that sets no key."""
        near = self._nearest(name[len(PREFIX) :].lower().replace("__", "."))
        names = [variable(key) for key in self.fields if key in near]
        names = names or get_close_matches(name.upper(), OTHER_ENVIRONMENT, 1, 0.8)
        known = [variable(key) for key in self.fields]
        return f"unknown variable {show(name, longest=None)[1:-1]} ({_suggest(names, known)})"

    def _unknown_key(self, names: list[str], value: object) -> str:
        shown = ".".join(name if _BARE_KEY.fullmatch(name) else show(name) for name in names)  # as TOML would spell it
        sections = [f"[{name}]" for name in self.sections]
        if len(names) == 1 and isinstance(value, Mapping):
            near = get_close_matches(f"[{names[0].lower()}]", sections, 1)
            return f"unknown section [{shown}] ({_suggest(near, sections)})"
        siblings = [known for known in self.fields if known.startswith(f"{names[0]}.")]
        near = self._nearest(".".join(names))
        return f"unknown key {shown} ({_suggest(near, siblings or ['block_size', *sections])})"

    def _nearest(self, key: str) -> list[str]:
        """Return the known keys that a misspelt or misplaced one most likely means, or none."""
        section, _, name = key.rpartition(".")
        name = name.lower().replace("-", "_").removeprefix(PREFIX.lower()).replace("__", ".")
        leaf = name.rpartition(".")[2]
        names = {known: known.rpartition(".")[2] for known in self.fields}
        here = {names[known]: known for known in self.fields if known.rpartition(".")[0] == section}
        return (
            [known for known in self.fields if known in {name, f"{section}.{name}"}]
            or [known for known in self.fields if names[known] == leaf or known.rpartition(".")[0] == name]
            or [here[near] for near in get_close_matches(leaf, here, 1)]
            or get_close_matches(f"{section}.{name}".lstrip("."), self.fields, 1, 0.8)
            or [known for known in self.fields if names[known] in get_close_matches(leaf, names.values(), 1)]
        )


def either(names: list[str]) -> str:
    """Return names as a choice: ``a, b or c``."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _suggest(near: list[str], known: list[str]) -> str:
    return f"did you mean {either(near)}?" if near else f"known: {', '.join(known)}"
