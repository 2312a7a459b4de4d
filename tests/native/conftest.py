"""Tests of compiled code need the compiler; those of its absence do not."""

import pytest

from polydraft.backends.native import kernels


@pytest.fixture
def compiled() -> None:
    if kernels() is None:
        pytest.skip("no C compiler here")
