"""Engines' memories and a converter, closed after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from deployments.conversion import Converter
from tests.deployments.conversion.converters import (
    converter,
)
from tests.deployments.engine_memory import EngineMemory


@pytest.fixture
def memories() -> Iterator[list[EngineMemory]]:
    """Engines that a test appends are closed after it."""
    made: list[EngineMemory] = []
    yield made
    for memory in made:
        memory.close()


@pytest.fixture
async def identity() -> AsyncIterator[Converter]:
    made = await converter()
    yield made
    await made.close()
