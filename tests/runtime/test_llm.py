"""The LLM class, as a program uses it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dflash_trt.errors import UserError
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import TINY, Engines
from tests.tiny_tokenizers import metaspace, save

PROMPTS = (TINY / "prompts.txt").read_text().splitlines()[:4]


@pytest.fixture
def llm(llms: Engines) -> LLM:
    return llms["tiny"]


def chats(llm: LLM) -> list[list[int]]:
    return [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


def test_greedy_equals_transformers(llm: LLM) -> None:
    target = AutoModelForCausalLM.from_pretrained(TINY / "target").double()
    outputs = llm.generate(chats(llm), SamplingParams(max_tokens=80))
    for ids, output in zip(chats(llm), outputs, strict=True):
        encoded = llm.tokenizer.pad({"input_ids": [ids]}, return_tensors="pt")
        expected = target.generate(**encoded, max_new_tokens=80, do_sample=False)[0, len(ids) :].tolist()
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == llm.tokenizer.decode(expected, skip_special_tokens=True)


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    text = PROMPTS[0]
    by_text, by_ids = llm.generate([text, llm.tokenizer.encode(text)], SamplingParams(max_tokens=10))
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_text.prompt == text and by_text.prompt_token_ids == by_ids.prompt


def test_stop_text_cuts_the_output_before_it(llm: LLM) -> None:
    ids = chats(llm)[0]
    whole = llm.generate([ids], SamplingParams(max_tokens=60))[0].outputs[0]
    stop = whole.text[20:24]
    cut = llm.generate([ids], SamplingParams(max_tokens=60, stop=(stop,)))[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert stop in llm.tokenizer.decode(cut.token_ids) and stop not in llm.tokenizer.decode(cut.token_ids[:-1])


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_stop_token_that_is_none_is_refused(llm: LLM, token: int) -> None:
    with pytest.raises(UserError, match=f"stop_token_ids: {token} is no token; they are 0 to"):
        llm.generate(["Once"], SamplingParams(min_tokens=1, stop_token_ids=(token,)))


def test_stop_token_ends_the_output_and_is_part_of_it(llm: LLM) -> None:
    ids = chats(llm)[0]
    whole = llm.generate([ids], SamplingParams(max_tokens=60))[0].outputs[0].token_ids
    stop = whole[25]
    cut = llm.generate([ids], SamplingParams(max_tokens=60, stop_token_ids=(stop,)))[0].outputs[0]
    assert cut.token_ids == whole[: whole.index(stop) + 1]
    assert cut.text == llm.tokenizer.decode(cut.token_ids[:-1], skip_special_tokens=True)
    assert cut.finish_reason == "stop"


def test_end_of_sequence(llm: LLM) -> None:
    """It ends an output unless ignored, and is no text."""
    ids = chats(llm)[0]
    eos = llm.engine.config.pretrained_config.eos_token_ids
    ended = llm.generate([ids], SamplingParams())[0].outputs[0]
    assert ended.finish_reason == "stop" and ended.token_ids[-1] in eos
    assert llm.tokenizer.eos_token not in ended.text
    count = len(ended.token_ids) + 5
    longer = llm.generate([ids], SamplingParams(max_tokens=count, ignore_eos=True))[0].outputs[0]
    assert longer.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert len(longer.token_ids) == count and longer.finish_reason == "length"


def test_several_outputs_of_a_prompt(llm: LLM) -> None:
    """Output i is what seed + i gives alone."""
    ids = chats(llm)[1]
    outputs = llm.generate([ids], SamplingParams(max_tokens=40, temperature=1.5, seed=40, n=3))[0].outputs
    assert [output.seed for output in outputs] == [40, 41, 42]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    for output in outputs:
        alone = llm.generate([ids], SamplingParams(max_tokens=40, temperature=1.5, seed=output.seed))[0].outputs[0]
        assert alone.token_ids == output.token_ids


def test_reported_seed_repeats_an_unseeded_output(llm: LLM) -> None:
    ids = chats(llm)[1]
    first = llm.generate([ids], SamplingParams(max_tokens=20, temperature=1.0))[0].outputs[0]
    again = llm.generate([ids], SamplingParams(max_tokens=20, temperature=1.0, seed=first.seed))[0].outputs[0]
    assert first.token_ids == again.token_ids


def test_stream_shows_what_generate_returns(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, stop=("\n",))
    stream = llm.stream(chats(llm), params)
    text: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    for emission in stream:
        text[id(emission.request)] = text.get(id(emission.request), "") + emission.text
        tokens.setdefault(id(emission.request), []).append(emission.token)
    outputs = [output.outputs[0] for output in stream.result()]
    assert list(text.values()) == [output.text for output in outputs]
    assert list(tokens.values()) == [output.token_ids for output in outputs]
    assert [output.text for output in outputs] == [o.outputs[0].text for o in llm.generate(chats(llm), params)]


def started(prompts: list[int], chunk: int) -> list[int]:
    """The step at which prompts of these lengths are through: one that fits into what another left shares its step."""
    step, room, steps = 0, 0, []
    for length in prompts:
        if length > room:
            step, length, room = step - (-length // chunk), (length - 1) % chunk + 1, chunk
        room -= max(length, -(-chunk // 8))
        steps.append(step)
    return steps


def test_statistics_add_up(llm: LLM) -> None:
    generation = llm.generate(chats(llm), SamplingParams(max_tokens=40), verify_window=llm.executor.max_window)
    statistics = generation.statistics
    each = [output.outputs[0].statistics for output in generation]
    assert statistics.output_tokens == sum(len(output.outputs[0].token_ids) for output in generation)
    assert statistics.decoded_tokens == statistics.output_tokens - len(PROMPTS)
    assert statistics.verifications == sum(one.verifications for one in each)
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens
    chunk = llm.executor.max_num_tokens
    starts = started([len(ids) for ids in chats(llm)], chunk)
    decoding = [range(step, step + one.verifications) for step, one in zip(starts, each, strict=True)]
    chunks = sum(-(-len(ids) // chunk) for ids in chats(llm))
    assert generation.target_passes == chunks + len(set().union(*decoding))
    assert generation.tokens_per_second > 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([""], "prompt 0: is empty"),
        ([[1, 2], []], "prompt 1: is empty"),
        ([[1, 99999]], "prompt 0: its ids must be integers"),
        ([[3] * 512], "prompt 0: has 512 tokens"),
        ([[3.5]], "prompt 0: its ids must be integers"),
        (["\udcff"], "no character"),
    ],
)
def test_refuses_prompts(llm: LLM, prompts: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(prompts)


def test_refuses_parameters(llm: LLM) -> None:
    with pytest.raises(UserError, match="2 sampling parameters for 1 prompts"):
        llm.generate([[3]], [SamplingParams()] * 2)
    for window in (0, llm.executor.max_window + 1):
        with pytest.raises(UserError, match=f"verify_window is {window}"):
            llm.generate([[3]], verify_window=window)


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    generation = llm.generate([])
    assert len(generation) == 0 and generation.tokens_per_second == 0


def test_a_single_text_is_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == (
        llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids
    )
    with pytest.raises(UserError, match="one list of token ids"):
        llm.generate([5, 6, 7])  # type: ignore[list-item]


def test_chat_template_arguments_and_refusals(llms: Engines) -> None:
    llm = LLM(llms["tiny"].engine.path, device="cpu")
    llm.tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}"
        "{{ mood | default('plain') }}: {{ messages[0].content }}"
    )
    message = {"role": "user", "content": "hi"}
    assert llm.tokenizer.decode(llm.encode_chat([message])) == "plain: hi"
    assert llm.tokenizer.decode(llm.encode_chat([message], mood="glad")) == "glad: hi"
    with pytest.raises(UserError, match="users first"):
        llm.encode_chat([{"role": "system", "content": "hi"}])
    with pytest.raises(UserError, match="'tokenize' is not the caller's"):
        llm.encode_chat([message], tokenize=True)
    for messages in ([], [{}], [{"role": "user"}]):
        with pytest.raises(UserError, match="a role and a text"):
            llm.encode_chat(messages)


def test_refuses_chat_without_a_template(llms: Engines) -> None:
    with pytest.raises(UserError, match="no chat template"):
        llms["llama"].encode_chat([{"role": "user", "content": "x"}])


def test_a_stream_that_lost_its_slots_says_so(llm: LLM) -> None:
    """Two calls at once would write over each other's caches; the one that started first must not go on silently."""
    first, second = (llm.stream(chats(llm)[:1], SamplingParams(max_tokens=20)) for _ in range(2))
    next(iter(first))
    assert len(second.result()[0].outputs[0].token_ids) == 20
    with pytest.raises(RuntimeError, match="finish a stream before the next call"):
        first.result()


def test_a_stream_that_is_left_goes_on(llm: LLM) -> None:
    """Leaving the loop inside an accepted block loses none of the block's tokens."""
    whole = llm.generate(chats(llm)[:1], SamplingParams(max_tokens=40))[0].outputs[0].token_ids
    for stop in range(1, 12):
        stream = llm.stream(chats(llm)[:1], SamplingParams(max_tokens=40))
        tokens = [next(stream).token for _ in range(stop)]
        assert tokens + [emission.token for emission in stream] == whole


def retokenized(llm: LLM, directory: Path, change: Callable[[Path], object]) -> LLM:
    """The engine with other files of a tokenizer."""
    shutil.copytree(llm.engine.path, directory)
    change(directory)
    return LLM(directory, device="cpu")


def test_the_class_that_a_tokenizer_names_changes_nothing(llm: LLM, tmp_path: Path) -> None:
    def rename(directory: Path) -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"}))

    other, params = retokenized(llm, tmp_path / "engine", rename), SamplingParams(max_tokens=20)
    found, expected = other.generate(PROMPTS, params), llm.generate(PROMPTS, params)
    assert [each.prompt_token_ids for each in found] == [each.prompt_token_ids for each in expected]
    assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in expected]


def test_text_goes_on_from_the_prompt(llms: Engines, tmp_path: Path) -> None:
    """A tokenizer that drops the first space of a text keeps that of an output."""
    llm = retokenized(llms["llama"], tmp_path / "engine", lambda directory: save(metaspace(), directory))
    space = llm.tokenizer.convert_tokens_to_ids("▁")
    params = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=3, ignore_eos=True, logit_bias={space: 100})
    for output in llm.generate([[5, 6]], params)[0].outputs:
        assert output.text == " " * output.token_ids.count(space)


@pytest.mark.parametrize("window", [1, None])
def test_a_special_token_stops(llm: LLM, window: int | None) -> None:
    ids = chats(llm)[0]
    params = SamplingParams(max_tokens=200, ignore_eos=True, stop="<|endoftext|>")
    cut = llm.generate([ids], params, verify_window=window)[0].outputs[0]
    ended = llm.generate([ids], SamplingParams(max_tokens=200))[0].outputs[0]
    assert ended.finish_reason == "stop"
    assert (cut.text, cut.token_ids, cut.finish_reason) == (ended.text, ended.token_ids, "stop")


@pytest.mark.parametrize("window", [1, None])
def test_stop_texts_wait_for_the_least_length(llm: LLM, window: int | None) -> None:
    """One that ends within it does not stop, the next one does, or that which only begins there."""
    ids = chats(llm)[0]
    whole = llm.generate([ids], SamplingParams(max_tokens=60))[0].outputs[0]
    ends = [len(llm.tokenizer.decode(whole.token_ids[:count])) for count in range(len(whole.token_ids) + 1)]
    for least in (0, 5, 20, 40):
        params = SamplingParams(max_tokens=60, min_tokens=least, stop=" ")
        cut = llm.generate([ids], params, verify_window=window)[0].outputs[0]
        at = whole.text.find(" ", ends[least])
        assert cut.text == (whole.text if at < 0 else whole.text[:at])
        assert len(cut.token_ids) > least
    across = whole.text[ends[10] - 2 : ends[10] + 1]
    first = whole.text.index(across)
    params = SamplingParams(max_tokens=60, min_tokens=10, stop=across)
    assert llm.generate([ids], params, verify_window=window)[0].outputs[0].text == whole.text[:first]
