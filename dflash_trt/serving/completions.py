"""`/v1/completions`: prompts continued as they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from dflash_trt.checkpoint.encoding import encode_text
from dflash_trt.errors import UserError
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scheduler import Emission
from dflash_trt.serving.call import Call, Choice, sources
from dflash_trt.serving.completion_protocol import CompletionRequest
from dflash_trt.serving.json_body import JsonRoute
from dflash_trt.serving.service import Service
from dflash_trt.serving.streaming import respond
from dflash_trt.serving.tokens import TokenTexts


class CompletionChoice(Choice):
    """A continuation, after its prompt where the client wants that too."""

    def __init__(self, index: int, request: Request, body: CompletionRequest, echo: str, texts: TokenTexts) -> None:
        super().__init__(index, request)
        self._body = body
        self._echo = echo
        self._texts = texts

    def begin(self) -> dict[str, Any] | None:
        """See `Choice.begin`."""
        return self._said(self._echo, []) if self._echo else None

    def advance(self, emissions: Sequence[Emission]) -> dict[str, Any] | None:
        """See `Choice.advance`."""
        self.emitted += len(emissions)
        text = "".join(emission.text for emission in emissions)
        says_tokens = self._body.return_token_sources or self._body.logprobs is not None
        return self._said(text, emissions) if text or says_tokens else None

    def finish(self) -> list[dict[str, Any]]:
        """See `Choice.finish`."""
        return [{**self._said("", []), "finish_reason": self.request.finish_reason}]

    def whole(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        """See `Choice.whole`."""
        self.emitted = len(emissions)
        text = "".join(emission.text for emission in emissions)
        return {**self._said(self._echo + text, emissions), "finish_reason": self.request.finish_reason}

    def _said(self, text: str, emissions: Sequence[Emission]) -> dict[str, Any]:
        said = {"index": self.index, "text": text, "logprobs": self._logprobs(emissions), "finish_reason": None}
        return said | ({"token_sources": sources(emissions)} if self._body.return_token_sources else {})

    def _logprobs(self, emissions: Sequence[Emission]) -> dict[str, Any] | None:
        if self._body.logprobs is None or not emissions:
            return None
        return self._texts.in_completion(emissions, len(self._echo))


def completions_router(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, http: HttpRequest) -> Response:
        return await respond(http, service, body, partial(_prepare, service, body))

    return router


def _prepare(service: Service, body: CompletionRequest) -> Call:
    if not body.prompts:
        raise UserError("prompt is empty, it must be at least one text or list of token ids")
    many = body.prompts is body.prompt
    prompts = [(f"prompt[{i}]" if many else "prompt", _ids(service, i, body)) for i in range(len(body.prompts))]
    for field, ids in prompts:
        service.require_room(ids, field)
    form = body.asked_form()
    if form is not None:
        service.require_form(form, body.form_field)
    requests = service.requests(prompts, body, form)
    choices = []
    for index, request in enumerate(requests):
        echo = _text(service, body.prompts[index // (body.n or 1)]) if body.echo else ""
        choices.append(CompletionChoice(index, request, body, echo, service.texts))
    return Call(
        body,
        choices,
        model=service.settings.model_name,
        prefix="cmpl",
        names=("text_completion", "text_completion"),
    )


def _ids(service: Service, index: int, body: CompletionRequest) -> list[int]:
    prompt = body.prompts[index]
    if not isinstance(prompt, str):
        return prompt
    service.require_fitting_text(len(prompt), "prompt")
    return encode_text(service.llm.tokenizer, prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)


def _text(service: Service, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(service.llm.tokenizer.decode(prompt))
