"""The request of `/v1/completions`."""

from __future__ import annotations

from typing import Any, cast

from pydantic import Field

from dflash_trt.errors import UserError
from dflash_trt.serving.protocol import CommonRequest, Items, TokenId

_MAX_TOKENS = 16
"""OpenAI's, where a request does not say."""


class CompletionRequest(CommonRequest):
    """OpenAI's, with vLLM's extras."""

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=20)
    """Alternatives to report beside each token."""
    echo: bool | None = None
    """Begin with the prompt."""
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    """Those that the tokenizer puts around texts."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt, a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str] | list[list[int]]", self.prompt)

    @property
    def prompt_count(self) -> int:
        """See `CommonRequest.prompt_count`."""
        return len(self.prompts)

    def own_params(self) -> dict[str, Any]:
        """See `CommonRequest.own_params`.

        Raises:
            UserError: it asks for what there is not.
        """
        if self.suffix:
            raise UserError("suffix is not supported: models here continue texts, they do not fill gaps")
        if self.best_of not in (None, self.n or 1):
            raise UserError(f"best_of is {self.best_of}, it must be n, {self.n or 1}")
        if self.echo and self.logprobs is not None:
            raise UserError("logprobs is not supported with echo: prompts have none")
        params = {"max_tokens": _MAX_TOKENS if self.max_tokens is None else self.max_tokens}
        return params if self.logprobs is None else {**params, "logprobs": self.logprobs}
