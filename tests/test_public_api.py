"""What ``import tierkv`` promises: the list, the names behind it, and every error."""

import inspect

import pytest

import tierkv
from tierkv import errors

ERRORS = sorted(
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
)


def test_the_list_is_sorted_and_without_repetition():
    assert tierkv.__all__ == sorted(set(tierkv.__all__))


@pytest.mark.parametrize("name", tierkv.__all__)
def test_every_listed_name_resolves(name):
    value = getattr(tierkv, name)
    assert value is getattr(tierkv, name)
    if name != "__version__":
        assert value.__module__.startswith("tierkv.")
        assert value.__doc__, f"{name} is public and has no docstring"


def test_the_list_equals_what_is_exported():
    for name in tierkv.__all__:
        getattr(tierkv, name)
    exported = {
        name
        for name, value in vars(tierkv).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("tierkv.")
    }
    assert exported | {"__version__"} == set(tierkv.__all__)


def test_dir_shows_every_public_name():
    assert set(tierkv.__all__) <= set(dir(tierkv))


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_exported_and_drawn_in_the_tree(name):
    assert name in tierkv.__all__
    assert getattr(tierkv, name) is getattr(errors, name)
    assert issubclass(getattr(errors, name), errors.TierKVError)
    assert name in (errors.__doc__ or "")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'attatch'"):
        tierkv.attatch  # noqa: B018  (the access is what is tested)
