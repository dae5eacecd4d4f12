"""Servers of the tiny pair in float64, and the same engine by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_trt.runtime.llm import LLM
from tests.conftest import Engines
from tests.serving.running_server import RunningServer, running


@pytest.fixture(scope="module")
def server(llms: Engines) -> Iterator[RunningServer]:
    """A server with everything as it is by default."""
    with running(llms["tiny"]) as server:
        yield server


@pytest.fixture(scope="session")
def alone(llms: Engines) -> LLM:
    """The engine that is served, with slots of its own: what it makes of a prompt is what a server must."""
    return LLM(llms["tiny"].engine.path, device="cpu")
