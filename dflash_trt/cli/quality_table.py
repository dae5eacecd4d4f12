"""A quality report as tables on stdout."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from dflash_trt.benchmarking.quality_report import QualityReport


def print_quality(report: QualityReport) -> None:
    """Print what each format cost in weights, what both models did on text, and what was not run and why."""
    console = Console(highlight=False)
    console.print(_weights(report))
    if report.text is not None or report.acceptance is not None:
        console.print(_behaviour(report))
    names = {"text": "perplexity and agreement", "acceptance": "acceptance length"}
    for what, reason in report.not_run.items():
        console.print(f"{names[what]}: not measured, {reason}", soft_wrap=True)


def _weights(report: QualityReport) -> Table:
    columns = ("model", "format", "layers", "median error", "worst error", Column("worst layer", overflow="fold"))
    table = Table(*columns, title="Error of weights, relative root mean square", title_justify="left")
    for model, errors in report.weights.items():
        for found in errors.formats:
            relative = (f"{error:.2%}" for error in (found.median_relative_error, found.worst_relative_error))
            worst = found.worst_layer if found.worst_relative_error else "-"
            table.add_row(model, found.format, str(found.layers), *relative, worst)
    return table


def _behaviour(report: QualityReport) -> Table:
    table = Table(
        "measured", "original", "converted", title=f"In use, computed in {report.dtype}", title_justify="left"
    )
    text, acceptance = report.text, report.acceptance
    if text is not None:
        table.add_row(
            f"perplexity of {text.tokens} tokens", f"{text.original_perplexity:.3f}", f"{text.converted_perplexity:.3f}"
        )
        table.add_row("same likeliest token", "", f"{text.greedy_agreement:.2%}")
        table.add_row("KL divergence, nats a token", "", f"{text.mean_kl_divergence:.4f}")
    if acceptance is not None:
        lengths = (pair.acceptance_length for pair in (acceptance.original, acceptance.converted))
        table.add_row("acceptance length", *("-" if length is None else f"{length:.2f}" for length in lengths))
    return table
