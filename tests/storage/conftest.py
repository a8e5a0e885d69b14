"""Shared by the storage tests."""

import pytest

# Plain asserts in the shipped suite explain themselves as those in test files do.
pytest.register_assert_rewrite("tierkv.testing.contracts")


@pytest.fixture
def store(tmp_path):
    """A prefix store of 8 MiB."""
    from tests.storage.prefixes import prefixes

    with prefixes(tmp_path) as store:
        yield store
