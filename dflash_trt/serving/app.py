"""The server as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from dflash_trt import __version__
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.parallel_executor import ParallelExecutor
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.serving.chat import chat_router
from dflash_trt.serving.completions import completions_router
from dflash_trt.serving.defaults import sampling_defaults
from dflash_trt.serving.engine_thread import EngineThread
from dflash_trt.serving.errors import answer_errors
from dflash_trt.serving.failures import Failures
from dflash_trt.serving.guards import BodyLimit, HeadAsGet, KeyGuard
from dflash_trt.serving.json_body import IGNORED_FIELDS
from dflash_trt.serving.limits import RequestLimits, request_limits
from dflash_trt.serving.metrics import Metrics
from dflash_trt.serving.operations import models_router, operations_router
from dflash_trt.serving.page import page_router
from dflash_trt.serving.request_id import REQUEST_ID, RequestIds
from dflash_trt.serving.service import Service
from dflash_trt.serving.settings import ServerSettings
from dflash_trt.serving.tokenization import tokenization_router
from dflash_trt.serving.tokens import TokenTexts
from dflash_trt.serving.unknown_fields import IgnoredFields


def create_app(llm: LLM, settings: ServerSettings) -> FastAPI:
    """An application that serves an engine, and has its slots to itself while it runs.

    Its `state.service` has the `EngineThread`, whose `drain` comes before an orderly end.

    Raises:
        UserError: a setting, or a default in the engine's generation_config.json, cannot be.
    """
    executor = llm.executor
    scheduler = Scheduler(
        executor,
        llm.windows(settings.verify_window),
        max_batch_size=settings.max_batch_size,
        reuse_prefixes=settings.reuse_prefixes,
    )
    prefixes = ("dflash_trt:", "vllm:") if settings.vllm_metrics else ("dflash_trt:",)
    metrics = Metrics(settings.model_name, scheduler.max_batch_size * executor.max_seq_len, prefixes)

    def may_step() -> None:
        if llm.slots_used_by is not scheduler:
            raise RuntimeError("another call has used this LLM's slots since it is served")

    engine = EngineThread(
        scheduler,
        most_requests=scheduler.max_batch_size + settings.max_queue,
        may_step=may_step,
        on_arrival=metrics.arrive,
        on_progress=metrics.progress,
    )
    limits = request_limits(llm.tokenizer, max_seq_len=executor.max_seq_len, max_body_size=settings.max_body_size)
    service = Service(
        llm,
        settings,
        engine,
        TokenTexts(llm.tokenizer),
        sampling_defaults(llm.engine.path),
        limits,
        IgnoredFields(metrics.ignore),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        llm.slots_used_by = scheduler
        engine.start()
        if isinstance(executor, ParallelExecutor):
            executor.when_a_rank_ends(engine.fail)
        yield
        await engine.stop()

    app = FastAPI(title="dflash-trt", version=__version__, lifespan=lifespan, redirect_slashes=False)
    app.state.service = service
    for router in (
        models_router(service),
        completions_router(service),
        chat_router(service),
        tokenization_router(service),
        operations_router(service, metrics),
        page_router(service),
    ):
        app.include_router(router)
    answer_errors(app)
    _guard(app, settings, limits)
    return app


def _guard(app: FastAPI, settings: ServerSettings, limits: RequestLimits) -> None:
    """Put middleware around an app, the innermost first."""
    app.add_middleware(Failures)
    app.add_middleware(BodyLimit, max_size=limits.max_body_size, max_held=limits.max_held)
    if settings.api_keys:
        app.add_middleware(KeyGuard, keys=settings.api_keys)
    app.add_middleware(HeadAsGet)
    if settings.allowed_origins:
        # Outside of keys: a browser's preflight has none.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", IGNORED_FIELDS, REQUEST_ID],
        )
    app.add_middleware(RequestIds)
