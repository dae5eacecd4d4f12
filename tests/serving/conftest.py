"""Servers of the tiny pair in float64, and the same engine by itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_trt.runtime.llm import LLM
from tests.conftest import TINY, Engines, build_pair
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


@pytest.fixture(scope="session")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes an engine directory of the tiny pair behind a chat template, with room for tools in prompts."""
    engine = tmp_path_factory.mktemp("tools") / "engine"
    build_pair(engine, TINY / "target", TINY / "drafter", max_seq_len=2048, max_num_tokens=64)

    def make(template: str) -> Path:
        directory = tmp_path_factory.mktemp("templated") / "engine"
        shutil.copytree(engine, directory)
        (directory / "chat_template.jinja").write_text(template)
        return directory

    return make
