"""Every kernel compiles for every GPU that it may run on, within what that has."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dflash_trt.errors import UserError
from dflash_trt.plugins.compile import configurations, main, parse
from dflash_trt.plugins.gpus import AHEAD_OF_TIME_SHARED, SHARED_MEMORY
from dflash_trt.plugins.kernel import Kernel

CONFIGURATIONS = tuple(configurations(103))
OF_EVERY_KIND = (
    "kv_write, bf16 cache, d 128",
    "kv_write, fp8 cache, d 128",
    "attention, bf16 cache, d 128",
    "attention, fp8 cache, d 128",
    "combine, d 128",
    "verify, bf16, 151936 tokens",
    "verify, combined",
)
"""Of each kernel, and where it has a cache of each type, the one that takes most; the others are compiled for sm103."""


def test_every_kernel_and_cache_is_among_those_of_every_kind() -> None:
    kinds = {name: (kernel.name, kernel.parameters.get("k_cache")) for name, kernel in configurations(103).items()}
    assert {kinds[name] for name in OF_EVERY_KIND} == set(kinds.values())


@pytest.mark.parametrize("compute_capability", SHARED_MEMORY)
@pytest.mark.parametrize("configuration", OF_EVERY_KIND)
def test_every_kind_compiles_for_every_gpu(configuration: str, compute_capability: int) -> None:
    check(configurations(compute_capability)[configuration], compute_capability)


@pytest.mark.parametrize("configuration", [name for name in CONFIGURATIONS if name not in OF_EVERY_KIND])
def test_every_configuration_compiles(configuration: str) -> None:
    check(configurations(103)[configuration], 103)


def check(kernel: Kernel, compute_capability: int) -> None:
    compiled = kernel.compile(compute_capability)
    declared = ["u64" if kind.startswith("*") else "u32" for kind in kernel.parameters.values()]
    assert list(compiled.parameters) == declared
    assert compiled.shared <= AHEAD_OF_TIME_SHARED
    assert compiled.registers * compiled.threads <= 65536
    assert compiled.spills <= (0 if "attention" in kernel.name else 64), f"{compiled.spills} bytes a thread"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_every_kernel_as_json() -> None:
    report = json.loads(run("--compute_capability", "sm103", "--format", "json"))
    assert report["compute_capability"] == "sm103"
    assert [kernel["configuration"] for kernel in report["kernels"]] == list(CONFIGURATIONS)
    for found, kernel in zip(report["kernels"], configurations(103).values(), strict=True):
        compiled = kernel.compile(103)
        assert (found["registers"], found["shared"], found["threads"]) == (
            compiled.registers,
            compiled.shared,
            compiled.threads,
        )
        assert [name for name, _ in found["parameters"]] == list(kernel.parameters)


def test_the_command_prints_every_kernel_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table = run("--compute_capability", "sm103")
    assert "227 KiB" in table
    for kernel in configurations(103).values():
        assert kernel.name in table
        assert str(kernel.compile(103).registers) in table


@pytest.mark.parametrize("wrong", ["sm75", "103", "blackwell"])
def test_a_gpu_without_kernels_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(UserError, match=rf"'{wrong}', it must be one of sm80, sm86, sm89, sm90, sm100, sm103, sm120"):
        parse(wrong)
    result = CliRunner().invoke(main, ["--compute_capability", wrong])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
