"""Fields of OpenAI, vLLM, SGLang and TensorRT-LLM that change an answer there, and that nothing here reads.

To ignore one would give a wrong answer without a word, so a request that uses one is refused. All other fields of these
servers are hints, labels, or statistics: `verbosity`, `prediction`, `session_id`, `return_meta_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class PeerField(NamedTuple):
    """Why a field is refused, and the values beside null and empty ones that ask for nothing."""

    reason: str
    harmless: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether the answer is the same without the field."""
        if value is None or (isinstance(value, str | list | dict) and not value):
            return True
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.harmless)


_BEAM_SEARCH = "beam search is not supported"
_CHAT = "belongs to /v1/chat/completions"
_COMPLETION = "belongs to /v1/completions"
_DISAGGREGATED = "this server runs prompts and answers in one place"
_FORM = "use structured_outputs"
_HIDDEN = "what passes inside the model is not given out"
_LORA = "this server has one model and no adapters"
_LOGITS = "logits are changed by logit_bias only"
_PROMPT_IDS = "give token ids as prompt of /v1/completions"
_SCHEMA = "the grammar writes JSON in one way only"
_SPECIAL = "a request does not choose which special tokens have text"
_STOP_TEXT = "stop texts are never part of the output"
_THINKING = "use reasoning_effort, or what the chat template reads in chat_template_kwargs"
_TOKEN_IDS = "answers have texts, and tokens with logprobs; /tokenize gives the ids of a text"
_TRUNCATION = "prompts are not truncated"

PROMPT_FIELDS: Mapping[str, PeerField] = {
    "chat_template": PeerField("the engine's chat template is used"),
    "continue_final_message": PeerField("an assistant's message is not continued", (False,)),
    "documents": PeerField("give documents in messages, or in chat_template_kwargs where the template reads them"),
    "input_ids": PeerField(_PROMPT_IDS),
    "messages[].tools": PeerField("give tools beside messages"),
    "prompt_embeds": PeerField("prompts are texts or token ids"),
    "prompt_token_ids": PeerField(_PROMPT_IDS),
    "prompt_token_ids_b64": PeerField(_PROMPT_IDS),
    "reasoning": PeerField(_THINKING),
    "task": PeerField("the chat template has no tasks"),
    "thinking": PeerField(_THINKING),
    "tools[].defer_loading": PeerField("all tools are shown to the model", (False,)),
    "tools[].function.defer_loading": PeerField("all tools are shown to the model", (False,)),
    "truncate_prompt_tokens": PeerField(_TRUNCATION),
}
"""Those that change the prompt, which `/tokenize` shows too. Names in objects have their path, without indices."""

ANSWER_FIELDS: Mapping[str, PeerField] = {
    **PROMPT_FIELDS,
    # OpenAI
    "audio": PeerField("answers are text"),
    "function_call": PeerField("use tool_choice", ("none", "auto")),
    "functions": PeerField("use tools"),
    "moderation": PeerField("this server does not moderate"),
    "web_search_options": PeerField("this server does not search"),
    # One endpoint's, sent to the other
    "add_generation_prompt": PeerField(_CHAT, (True,)),
    "add_special_tokens": PeerField("the chat template writes special tokens", (False,)),
    "best_of": PeerField(_COMPLETION, (1,)),
    "chat_template_kwargs": PeerField(_CHAT),
    "echo": PeerField(_COMPLETION, (False,)),
    "include_reasoning": PeerField(_CHAT, (True,)),
    "max_completion_tokens": PeerField("use max_tokens"),
    "messages": PeerField(_CHAT),
    "prompt": PeerField(_COMPLETION),
    "response_format": PeerField(_FORM, ({"type": "text"},)),
    "suffix": PeerField(_COMPLETION),
    "tool_choice": PeerField(_CHAT, ("none", "auto")),
    "tools": PeerField(_CHAT),
    "top_logprobs": PeerField("use logprobs", (0,)),
    # vLLM
    "allowed_token_ids": PeerField("use structured_outputs.choice, or logit_bias"),
    "bad_words": PeerField("use logit_bias"),
    "cache_salt": PeerField("the prefix cache is not salted; start the server with --no_prefix_reuse"),
    "ec_transfer_params": PeerField(_DISAGGREGATED),
    "guided_choice": PeerField(_FORM),
    "guided_grammar": PeerField(_FORM),
    "guided_json": PeerField(_FORM),
    "guided_regex": PeerField(_FORM),
    "include_stop_str_in_output": PeerField(_STOP_TEXT, (False,)),
    "kv_transfer_params": PeerField(_DISAGGREGATED),
    "length_penalty": PeerField(_BEAM_SEARCH, (1,)),
    "logits_processors": PeerField(_LOGITS),
    "logprob_token_ids": PeerField("use logprobs"),
    "prompt_logprobs": PeerField("log-probabilities of prompts are not given"),
    "repetition_detection": PeerField("use repetition_penalty or frequency_penalty"),
    "return_prompt_text": PeerField("prompts are not sent back", (False,)),
    "return_token_ids": PeerField(_TOKEN_IDS, (False,)),
    "return_tokens_as_token_ids": PeerField(_TOKEN_IDS, (False,)),
    "skip_special_tokens": PeerField(_SPECIAL, (True,)),
    "spaces_between_special_tokens": PeerField(_SPECIAL, (True,)),
    "structured_outputs.disable_additional_properties": PeerField("say additionalProperties in the schema", (False,)),
    "structured_outputs.disable_any_whitespace": PeerField(_SCHEMA, (False,)),
    "structured_outputs.structural_tag": PeerField("use tools, or structured_outputs.grammar"),
    "structured_outputs.whitespace_pattern": PeerField(_SCHEMA),
    "thinking_token_budget": PeerField("thinking has no budget of its own", (-1,)),
    "use_beam_search": PeerField(_BEAM_SEARCH, (False,)),
    "vllm_xargs": PeerField("this server has no extensions"),
    "watermarking": PeerField("answers are not watermarked", (False,)),
    # SGLang
    "custom_logit_processor": PeerField(_LOGITS),
    "custom_params": PeerField(_LOGITS),
    "ebnf": PeerField(_FORM),
    "json_schema": PeerField(_FORM),
    "lora_path": PeerField(_LORA),
    "no_stop_trim": PeerField(_STOP_TEXT, (False,)),
    "regex": PeerField(_FORM),
    "return_hidden_states": PeerField(_HIDDEN, (False,)),
    "return_prompt_token_ids": PeerField(_TOKEN_IDS, (False,)),
    "return_routed_experts": PeerField(_HIDDEN, (False,)),
    "separate_reasoning": PeerField("thinking is always apart from content", (True,)),
    "session_params": PeerField("this server keeps no sessions; send the whole prompt"),
    "stop_regex": PeerField("stop takes texts"),
    # TensorRT-LLM
    "detokenize": PeerField("answers are text", (True,)),
    "disaggregated_params": PeerField(_DISAGGREGATED),
    "early_stopping": PeerField(_BEAM_SEARCH, (False,)),
    "lora_request": PeerField(_LORA),
    "prompt_ignore_length": PeerField("penalties look at the whole output, or prompt and output", (0,)),
    "response_format.schema": PeerField("give the schema as response_format.json_schema.schema"),
    "return_context_logits": PeerField(_HIDDEN, (False,)),
    "top_p_min": PeerField("top_p does not decay", (0,)),
}
"""Those of a completion request."""
