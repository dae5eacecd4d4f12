"""Token ids of texts and conversations, against transformers' own way from messages to ids."""

from __future__ import annotations

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.checkpoint.encoding import encode_conversation, encode_text
from dflash_trt.errors import UserError
from tests.conftest import TINY

MESSAGES = [{"role": "user", "content": "Copy: oak café."}, {"role": "assistant", "content": "oak café."}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny pair's, which starts texts with a token of its own as Llama 3's does, in its chat template too."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", pair="<|system|> $A $B", special_tokens=[("<|system|>", 2)]
    )
    tokenizer.chat_template = "<|system|>" + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_conversation_is_what_transformers_makes_of_it(
    tokenizer: PreTrainedTokenizerFast, add_generation_prompt: bool
) -> None:
    ids = encode_conversation(tokenizer, MESSAGES, "x", add_generation_prompt=add_generation_prompt)
    assert ids == tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=add_generation_prompt, return_dict=False
    )


def test_the_first_token_is_there_once(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = encode_conversation(tokenizer, MESSAGES, "x", add_generation_prompt=False)
    for ids in (conversation, encode_text(tokenizer, "Copy: oak.", "x")):
        assert ids[0] == 2 and ids.count(2) == 1


def test_template_arguments_may_have_any_name(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ where }} {{ tokenizer }} {{ template }}{{ messages[0].content }}"
    names = {"where": "oak", "tokenizer": "hare", "self": "x", "template": "fox ", "render": "x", "variables": "x"}
    ids = encode_conversation(tokenizer, MESSAGES[:1], "x", add_generation_prompt=True, **names)
    assert tokenizer.decode(ids) == "oak hare fox Copy: oak café."


def test_refusals_name_the_place(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"^here: the text holds '\\udcff' at 1, which is no character"):
        encode_text(tokenizer, "a\udcff", "here")
    for broken in (
        [],
        [{}],
        [{"role": "user"}],
        [{"content": "a"}],
        ["a"],
        "ab",
        5,
        [{"role": "user", "content": [1]}],
    ):
        with pytest.raises(UserError, match=r"^here: a conversation needs messages"):
            encode_conversation(tokenizer, broken, "here", add_generation_prompt=True)  # type: ignore[arg-type]
    tokenizer.chat_template = "{{ raise_exception('users first') }}"
    with pytest.raises(UserError, match=r"^here: the chat template refuses the messages: users first"):
        encode_conversation(tokenizer, MESSAGES, "here", add_generation_prompt=True)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"^here: the model has no chat template"):
        encode_conversation(tokenizer, MESSAGES, "here", add_generation_prompt=True)
