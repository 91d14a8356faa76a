"""Settings of the mappers' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tensors here are too small for a second thread to help."""
    torch.set_num_threads(1)
