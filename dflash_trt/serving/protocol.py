"""What both kinds of completion request may say: OpenAI's names, vLLM's extras, and our own of speculation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dflash_trt.runtime.lark import Lark
from dflash_trt.runtime.sampling_params import SEED_LIMIT, SamplingParams
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.peer_fields import ANSWER_FIELDS, PeerField

Count = Annotated[int, Field(ge=1, lt=2**31)]
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""Refused at the first item that is wrong: a list may have millions."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_MOST_FIELDS = 256
"""More than any object has that a request is made of."""
_MOST_TOKENS = 1024
"""That a request may single out: each of its outputs keeps them."""
_MOST_NAMED = 20
"""Keys that a refusal names."""


def _require_at_most(count: int, value: Any) -> Any:
    """Refuse a larger object before anything in it is looked at."""
    if isinstance(value, dict) and len(value) > count:
        raise PydanticCustomError(
            "too_long", "it has {found} entries, it may have {most}", {"found": len(value), "most": count}
        )
    return value


Variables = Annotated[dict[str, Any], BeforeValidator(partial(_require_at_most, _MOST_FIELDS))]
"""Named by the client."""
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
)
"""Fields that `SamplingParams` has by the same name."""


class Strict(BaseModel):
    """Part of a request: types as they are, and no number without an end. See `ignored_fields` for other fields."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _require_few_fields(cls, value: Any) -> Any:
        """Each that nothing reads is told."""
        return _require_at_most(_MOST_FIELDS, value)


class StreamOptions(Strict):
    """OpenAI's, and vLLM's second."""

    include_usage: bool | None = None
    """A last chunk with the usage and no choice."""
    continuous_usage_stats: bool | None = None
    """The usage so far on every chunk."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against those who listen; there is none."""


class StructuredOutputsField(Strict):
    """vLLM's: what form the output must have. Exactly one is given."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None

    def to_runtime(self) -> StructuredOutputs:
        """As the engine takes it."""
        return StructuredOutputs(self.json_, self.regex, self.choice, self.grammar, self.json_object)


class CommonRequest(Strict):
    """None is what a field is that a client does not give, or gives as null."""

    peer_fields: ClassVar[Mapping[str, PeerField]] = ANSWER_FIELDS

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(partial(_require_at_most, _MOST_TOKENS))] = None
    """By token id, in decimal; -100 to 100."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=16384)
    stop: str | Annotated[Items[str], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=_MOST_TOKENS)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Count | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    structured_outputs: StructuredOutputsField | None = None
    priority: int | None = Field(None, ge=-(2**63), lt=2**63)
    """Lower numbers go first."""
    verify_window: int | None = Field(None, ge=1)
    """Tokens that a pass verifies for this request; 1 forbids speculation. The output does not depend on it."""
    return_speculation: bool | None = None
    """Say beside the usage what speculation did."""
    return_token_sources: bool | None = None
    """Say of each token whether it was drafted."""
    user: str | None = None
    """Accepted for OpenAI's clients; has no effect."""

    @model_validator(mode="after")
    def _require_stream(self) -> CommonRequest:
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise InvalidField("stream_options", "is given, which goes with stream true")
        return self

    @property
    def prompt_count(self) -> int:
        """Prompts, each of which has `n` outputs."""
        return 1

    def sampling_params(
        self, defaults: Mapping[str, Any], form: StructuredOutputs | Lark | None, vocab_size: int
    ) -> SamplingParams:
        """What it asks of the engine, `defaults` where it does not say, and the form of its outputs.

        Raises:
            UserError: a parameter is out of range.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            given["seed"] = self.seed % SEED_LIMIT
        if self.logit_bias:
            given["logit_bias"] = token_biases(self.logit_bias, vocab_size)
        if form is not None:
            given["structured_outputs"] = form
        return SamplingParams(**{**defaults, **given, **self.own_params()})

    def own_params(self) -> dict[str, Any]:
        """Parameters that this kind of request says in its own way."""
        return {}

    def asked_form(self) -> StructuredOutputs | None:
        """The form that outputs must have, by the request's own words.

        Raises:
            UserError: it asks for no form, or for two.
        """
        return None if self.structured_outputs is None else self.structured_outputs.to_runtime()

    @property
    def form_field(self) -> str:
        """The field that says it."""
        return "structured_outputs"

    @property
    def usage_at_end(self) -> bool:
        """A stream ends with a chunk of the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        """Every chunk of a stream has the usage so far."""
        return self.usage_at_end and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def token_biases(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """`logit_bias` by token id.

    Raises:
        InvalidField: keys are no ids of the vocabulary; it names them all, or the first few.
    """
    strange = [key for key in given if not _is_token_id(key, vocab_size)]
    if strange:
        names = ", ".join(repr(key[:40]) for key in strange[:_MOST_NAMED])
        rest = len(strange) - _MOST_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        one = len(strange) == 1 and strange[0].isdecimal()
        field = f"logit_bias[{strange[0][:40]}]" if one else "logit_bias"
        raise InvalidField(field, f"keys must be token ids, 0 to {vocab_size - 1}, not {names}{more}")
    return {int(key): bias for key, bias in given.items()}


def _is_token_id(text: str, vocab_size: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < vocab_size
