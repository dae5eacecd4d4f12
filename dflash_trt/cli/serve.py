"""`dflash-trt serve`: an OpenAI-compatible server for an engine directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.options import device, directory, proposer
from dflash_trt.errors import UserError

if TYPE_CHECKING:
    from dflash_trt.runtime.proposer import ProposerName


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@,]+")


def _origins(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    origins = tuple(origin.strip() for each in given for origin in each.split(","))
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise UserError(f"--allowed_origins {origin!r}: is no origin; give one as https://example.org, or *")
    return origins


@click.command()
@click.argument("engine_dir", type=directory)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--served_model_name", help="What clients call the model.  [default: the directory's name]")
@click.option(
    "--api_key",
    "api_keys",
    multiple=True,
    envvar="DFLASH_TRT_API_KEY",
    help="A key that opens /v1; may be given again. DFLASH_TRT_API_KEY holds some, separated by blanks, out of sight "
    "of other users.  [default: open]",
)
@click.option(
    "--max_batch_size",
    type=click.IntRange(1),
    help="Requests decoded together.  [default: the engine's max_batch_size]",
)
@click.option(
    "--max_queue", type=click.IntRange(0), default=256, show_default=True, help="Requests that may wait for a slot."
)
@click.option(
    "--verify_window",
    type=click.IntRange(1),
    help="Tokens verified in a pass.  [default: what gives the most tokens a second]",
)
@click.option("--no_prefix_reuse", is_flag=True, help="Run every prompt from its beginning.")
@click.option(
    "--request_timeout", type=click.FloatRange(0, min_open=True), help="Seconds for a request.  [default: no limit]"
)
@click.option(
    "--max_body_size",
    type=click.IntRange(1),
    help="Bytes of a request's body.  [default: 1 MiB, and 32 bytes for each token of the engine's max_seq_len]",
)
@click.option(
    "--strict_fields", is_flag=True, help="Refuse requests with unknown fields.  [default: ignore and name them]"
)
@click.option(
    "--allowed_origins",
    multiple=True,
    callback=_origins,
    help="Origins whose pages may call the API, as https://example.org, separated by commas; * is all. May be given "
    "again.  [default: none but this server's own]",
)
@click.option(
    "--drain_timeout",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds for answers in flight to end after SIGTERM.",
)
@click.option("--vllm_metrics", is_flag=True, help="Give metrics under vLLM's names too.")
@proposer
@device
def serve(
    engine_dir: Path,
    host: str,
    port: int,
    served_model_name: str | None,
    api_keys: tuple[str, ...],
    max_batch_size: int | None,
    max_queue: int,
    verify_window: int | None,
    no_prefix_reuse: bool,
    request_timeout: float | None,
    max_body_size: int | None,
    strict_fields: bool,
    allowed_origins: tuple[str, ...],
    drain_timeout: float,
    vllm_metrics: bool,
    proposer: ProposerName,
    device: str | None,
) -> None:
    """Serve an engine by OpenAI's API until SIGTERM or Ctrl-C."""
    from dflash_trt.cli.progress import measure_passes
    from dflash_trt.runtime.llm import LLM
    from dflash_trt.serving.app import create_app
    from dflash_trt.serving.server import bind
    from dflash_trt.serving.server import serve as serve_app
    from dflash_trt.serving.settings import ServerSettings

    if not all(api_keys) or (not api_keys and "DFLASH_TRT_API_KEY" in os.environ):
        raise UserError("--api_key, or DFLASH_TRT_API_KEY, is empty; give a key, or neither")
    settings = ServerSettings(
        model_name=served_model_name or engine_dir.resolve().name,
        api_keys=api_keys,
        max_batch_size=max_batch_size,
        max_queue=max_queue,
        verify_window=verify_window,
        reuse_prefixes=not no_prefix_reuse,
        request_timeout=request_timeout,
        max_body_size=max_body_size,
        strict_fields=strict_fields,
        allowed_origins=allowed_origins,
        vllm_metrics=vllm_metrics,
    )
    # Before the engine is loaded, which may take minutes.
    with bind(host, port) as bound, LLM(engine_dir, device=device, proposer=proposer) as llm:
        if verify_window is None:
            measure_passes(llm)
        app = create_app(llm, settings)
        defaults = ", ".join(f"{name} {value}" for name, value in app.state.service.defaults.items())
        click.echo(f"where a request does not say: {defaults}", err=True)
        click.echo(f"longest request body: {app.state.service.limits.max_body_size} bytes", err=True)
        name = f"[{host}]" if ":" in host else host
        ready = f"serving {settings.model_name} at http://{name}:{bound.getsockname()[1]}"
        serve_app(app, bound, drain_timeout=drain_timeout, on_ready=lambda: click.echo(ready, err=True))
