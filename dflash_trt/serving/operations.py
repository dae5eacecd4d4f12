"""Endpoints for those who run a server, and for clients that ask what it has."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from dflash_trt import __version__
from dflash_trt.serving.answer import ShuttingDown
from dflash_trt.serving.errors import ApiError
from dflash_trt.serving.metrics import Metrics
from dflash_trt.serving.service import Service


def models_router(service: Service) -> APIRouter:
    """`/v1/models` and `/v1/models/{id}`."""
    router = APIRouter()
    model = {
        "id": service.settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dflash-trt",
        "root": service.settings.model_name,
        "parent": None,
        "max_model_len": service.llm.executor.max_seq_len,
    }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        service.require_model(name)
        return model

    return router


def operations_router(service: Service, metrics: Metrics) -> APIRouter:
    """Health, load, metrics, version."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        if service.engine.draining or service.engine.failure is not None:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.engine.open_requests}

    @router.get("/metrics")
    async def show_metrics() -> Response:
        try:
            snapshot = await service.engine.snapshot()
        except ShuttingDown as error:
            raise ApiError(503, str(error), code="shutting_down") from None
        return Response(metrics.text(snapshot), media_type=CONTENT_TYPE_LATEST)

    return router
