"""A tiny random policy that learners publish."""

from collections.abc import Callable

import pytest
from sampler_cases import Tiny, built


@pytest.fixture(scope="session")
def make() -> Callable[..., Tiny]:
    return built


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return built()
