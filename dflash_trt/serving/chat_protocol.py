"""The request of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from dflash_trt.errors import UserError
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.limits import RequestLimits
from dflash_trt.serving.protocol import CommonRequest, Count, Items, Strict, Variables


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str | None = None
    parsed_arguments: Any = None
    """What OpenAI's `parse()` and `stream()` made of them, which clients send back."""


class ToolCall(Strict):
    """An assistant's call of a tool."""

    id: str
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None
    """Of a stream's pieces, which clients send back."""


class ChatMessage(Strict):
    """A turn of the conversation; what OpenAI's clients send back of an answer is accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    """What OpenAI's `parse()` and `stream()` made of the content."""

    @property
    def characters(self) -> int:
        """Of its content."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or ()]
        return sum(map(len, parts))


class JsonSchema(Strict):
    """A schema and its name; `strict` is what it always is here."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_runtime(self) -> StructuredOutputs | None:
        """As the engine takes it.

        Raises:
            UserError: the schema is missing, or is not what `type` says.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            given = "null" if self.json_schema is None else "given"
            raise UserError(f"response_format.json_schema is {given}, type is {self.type}; it goes with json_schema")
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=self.json_schema.schema_)


class Function(Strict):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def require_few_messages(messages: Any, info: ValidationInfo) -> Any:
    """Refuse a conversation that cannot fit before any of it is looked at, where the context has `RequestLimits`."""
    limits: RequestLimits | None = info.context
    if limits is not None and isinstance(messages, list) and len(messages) > limits.max_messages:
        most = limits.max_messages
        raise InvalidField("messages", f"has {len(messages)} entries; the longest sequence is {most} tokens")
    return messages


def template_variables(kwargs: dict[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """What a chat template reads beside messages and tools.

    As in vLLM, an effort other than "none" also sets `enable_thinking`; `kwargs` win.
    """
    effort: dict[str, Any] = {}
    if reasoning_effort is not None:
        effort = {"reasoning_effort": reasoning_effort, "enable_thinking": reasoning_effort != "none"}
    return {**effort, **(kwargs or {})}


class ChatRequest(CommonRequest):
    """OpenAI's, with vLLM's extras."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    """OpenAI's new name of `max_tokens`; it wins."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = None
    """What else the chat template reads, `{"enable_thinking": false}` for one."""
    reasoning_effort: str | None = None
    """A variable of the chat template, "none" to "max"; see `template_variables`."""
    add_generation_prompt: bool | None = None
    """End the prompt where the assistant is to answer."""
    include_reasoning: bool | None = None
    """vLLM's: give the reasoning too, where the family keeps it apart."""
    modalities: list[Literal["text"]] | None = None
    metadata: Variables | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """This and the four before it: accepted for OpenAI's clients; without effect."""

    @field_validator("messages", mode="before")
    @classmethod
    def _require_few(cls, value: Any, info: ValidationInfo) -> Any:
        return require_few_messages(value, info)

    def own_params(self) -> dict[str, Any]:
        """See `CommonRequest.own_params`.

        Raises:
            UserError: fields do not go together.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError(f"top_logprobs is {self.top_logprobs}, which goes with logprobs true")
        params: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        return params

    def asked_form(self) -> StructuredOutputs | None:
        """See `CommonRequest.asked_form`."""
        form = super().asked_form()
        other = None if self.response_format is None else self.response_format.to_runtime()
        if form is not None and other is not None:
            raise UserError("response_format is given, and so is structured_outputs; give one")
        return form or other

    @property
    def form_field(self) -> str:
        """See `CommonRequest.form_field`."""
        if self.structured_outputs is not None:
            return super().form_field
        named = self.response_format is not None and self.response_format.json_schema is not None
        return "response_format.json_schema.schema" if named else "response_format"
