"""Shared by the storage tests."""

import pytest

# Plain asserts in the shipped suite explain themselves as those in test files do.
pytest.register_assert_rewrite("tierkv.testing.contracts")
