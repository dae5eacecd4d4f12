"""Throughput against interactivity, one curve a mode, as docs/performance.md shows it."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

from load import Load

matplotlib.use("svg")


def plot(loads: dict[int, dict[str, list[Load]]], name: str, path: Path) -> None:
    """Write the medians of every concurrency and mode as an SVG file."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for mode, style in (("adaptive", "o-"), ("full", "s--"), ("none", "^:")):
        points = {
            users: (
                statistics.median(load.interactivity for load in by_mode[mode]),
                statistics.median(load.throughput for load in by_mode[mode]),
            )
            for users, by_mode in loads.items()
        }
        axes.plot(*zip(*points.values(), strict=True), style, label=f"window: {mode}")
        if mode == "adaptive":
            for users, point in points.items():
                axes.annotate(f"{users}", point, textcoords="offset points", xytext=(6, 4))
    axes.set(xlabel="tokens/s that a user gets", ylabel="tokens/s of all users", title=f"{name}, by users at once")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
