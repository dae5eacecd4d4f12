"""Every command and every program in the documents runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_trt.serving.server import bind
from tests.cli.invoke import invoke
from tests.serving.server_process import serving

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"make": "CI runs these", "python": "benchmarks take minutes; figures stand with the command"}
"""First words of commands that are not run here, and why."""
PORT = "8000"
"""Of servers in the documents, which get a free one here."""


def blocks(document: Path) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_programs_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in a directory with nothing but the examples and the engine that docs/checkpoints.md builds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    build = ["build", "--checkpoint_dir", "examples/tiny", "--output_dir", "engines/tiny", "--max_seq_len", "1024"]
    assert invoke(capsys, *build).status == 0
    names: dict[str, object] = {}
    with bind("127.0.0.1", 0) as bound:
        port = str(bound.getsockname()[1])
    with ExitStack() as servers:
        for language, text in blocks(document):
            text = text.replace(PORT, port)
            if language == "python":
                exec(compile(text, str(document), "exec"), names)
                continue
            assert language == "sh", f"a block of {language} is not checked"
            for line in text.splitlines():
                command = shlex.split(line, comments=True)
                if command[-1] == "&":
                    assert command[:2] == ["dflash-trt", "serve"], line
                    servers.enter_context(serving(*command[2:-1]))
                elif command[0] == "curl":
                    subprocess.run([*command, "--fail-with-body"], check=True, timeout=60)
                elif command[0] not in ELSEWHERE:
                    assert command[0] == "dflash-trt", line
                    result = invoke(capsys, *command[1:])
                    assert result.status == 0, f"{line}: {result.err}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_every_benchmark_is_documented() -> None:
    pages = ("performance", "exactness", "structured_outputs")
    documented = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in pages)
    for script in (ROOT / "benchmarks").glob("*.py"):
        if "def main(" in script.read_text():
            assert f"python benchmarks/{script.name}" in documented
