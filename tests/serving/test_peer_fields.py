"""Every field of the schemas of OpenAI, vLLM, SGLang and TensorRT-LLM is read, refused, or known to change no answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from dflash_trt.serving.chat_protocol import ChatRequest
from dflash_trt.serving.completion_protocol import CompletionRequest
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.peer_fields import ANSWER_FIELDS, PROMPT_FIELDS
from dflash_trt.serving.protocol import CommonRequest
from dflash_trt.serving.tokenization import TokenizeRequest
from dflash_trt.serving.unknown_fields import ignored_fields

VLLM = """
use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs
priority request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
return_token_offsets return_prompt_text return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
repetition_detection stream_interval thinking_token_budget include_reasoning prompt_embeds best_of
"""
SGLANG = """
return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details return_token_ids
return_prompt_token_ids return_meta_info json_schema regex ebnf stop_regex no_stop_trim lora_path session_id
session_params custom_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room
routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id custom_labels task
reasoning separate_reasoning stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids
"""
TENSORRT_LLM = """
lora_request prompt_ignore_length top_p_min early_stopping return_context_logits detokenize disaggregated_params
conversation_params prompt_token_ids prompt_token_ids_b64 thinking injected_chat_template_kwargs agent_hierarchy
"""
HINTS = frozenset(
    """
    prediction prompt_cache_options prompt_cache_retention verbosity truncation_side media_io_kwargs
    mm_processor_kwargs request_id session_id routed_experts_prompt_start return_token_offsets return_mm_kwargs
    stream_interval routed_experts_start_len return_cached_tokens_details return_meta_info images_config
    bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid
    extra_key ngram_corpus_id custom_labels stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video
    conversation_params injected_chat_template_kwargs agent_hierarchy
    """.split()  # noqa: SIM905
)
"""Speed, labels, routes, statistics, and what goes with a field that is refused."""
CHAT_HINTS = frozenset(
    """
    metadata modalities parallel_tool_calls prompt_cache_key reasoning_effort safety_identifier service_tier store
    """.split()  # noqa: SIM905
)
"""Fields of chat that change nothing where there is no chat."""
OPENAI = {
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
}
TOOL = {"type": "function", "function": {"name": "rain"}}
MESSAGE = {"role": "user", "content": "Hi"}


def body_with(path: str, value: Any) -> tuple[type[CommonRequest], dict[str, Any]]:
    """A request that nothing else is wrong with, by a path of the table."""
    if path == "prompt" or (path.split("[")[0].split(".")[0] in ChatRequest.model_fields and re.search(r"[.\[]", path)):
        kind: type[CommonRequest] = ChatRequest
    else:
        kind = CompletionRequest if path in ChatRequest.model_fields else ChatRequest
    body: dict[str, Any] = {"messages": [{**MESSAGE}]} if kind is ChatRequest else {"prompt": "Hi"}
    if re.search(r"[.\[]", path):
        body |= {"tools": [{**TOOL, "function": {**TOOL["function"]}}]}  # type: ignore[dict-item]
        body |= {"response_format": {"type": "json_object"}, "structured_outputs": {}}
    inside: Any = body
    *names, last = path.replace("[]", ".0").split(".")
    for name in names:
        inside = inside[0] if name == "0" else inside[name]
    inside[last] = value
    return kind, body


def ignored(path: str, value: Any, *, strict: bool = False) -> list[str]:
    kind, body = body_with(path, value)
    return ignored_fields(kind.model_validate(body), body, kind.peer_fields, strict=strict)


@pytest.mark.parametrize("path", ANSWER_FIELDS)
def test_what_would_change_an_answer_is_refused_by_name(path: str) -> None:
    asking: Any = next((not each for each in ANSWER_FIELDS[path].harmless if isinstance(each, bool)), ["x"])
    with pytest.raises(InvalidField) as refusal:
        ignored(path, asking)
    assert refusal.value.field == path.replace("[]", "[0]")
    assert ANSWER_FIELDS[path].reason in str(refusal.value)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("path", ANSWER_FIELDS)
def test_what_asks_for_nothing_never_is(path: str, strict: bool) -> None:
    for value in (None, [], {}, "", *ANSWER_FIELDS[path].harmless):
        assert ignored(path, value, strict=strict) == []


def test_numbers_and_truth_values_are_not_each_other() -> None:
    assert ignored("length_penalty", 1.0) == ignored("top_p_min", 0.0) == []
    for path, value in (("use_beam_search", 0), ("best_of", True), ("prompt_ignore_length", False)):
        with pytest.raises(InvalidField):
            ignored(path, value)


@pytest.mark.parametrize("name", sorted({*OPENAI, *VLLM.split(), *SGLANG.split(), *TENSORRT_LLM.split()}))
def test_every_field_of_a_peer_has_been_thought_of(name: str) -> None:
    assert not (name in HINTS and name in ANSWER_FIELDS)
    for kind, hints in ((ChatRequest, HINTS), (CompletionRequest, HINTS | CHAT_HINTS)):
        read = {field.alias or key for key, field in kind.model_fields.items()}
        assert name in read | kind.peer_fields.keys() | hints


def test_a_prompt_is_all_that_tokenizing_asks_about() -> None:
    assert PROMPT_FIELDS.items() <= ANSWER_FIELDS.items()
    body = {"messages": [MESSAGE], "response_format": {"type": "json_object"}, "prompt_logprobs": 1}
    found = ignored_fields(TokenizeRequest.model_validate(body), body, PROMPT_FIELDS, strict=False)
    assert found == ["response_format", "prompt_logprobs"]
    with pytest.raises(InvalidField):
        body = {**body, "continue_final_message": True}
        ignored_fields(TokenizeRequest.model_validate(body), body, PROMPT_FIELDS, strict=False)
