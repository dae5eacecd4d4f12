"""`dflash-trt run`: decode prompts with an engine directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.options import device, directory, file, json_object, output_format, proposer, token_biases
from dflash_trt.errors import UserError

if TYPE_CHECKING:
    from dflash_trt.runtime.generation import Generation, TokenStream
    from dflash_trt.runtime.llm import LLM
    from dflash_trt.runtime.logprobs import TokenLogprobs
    from dflash_trt.runtime.proposer import ProposerName
    from dflash_trt.runtime.structured import StructuredOutputs


@click.command()
@click.option("--engine_dir", type=directory, required=True, help="What `dflash-trt build` wrote.")
@click.option("--prompt", "prompts", multiple=True, required=True, help="A user's message; may be given again.")
@click.option("--raw_prompt", is_flag=True, help="Take prompts as plain text, without the chat template.")
@click.option(
    "--chat_template_kwargs",
    callback=json_object,
    default="{}",
    show_default=True,
    help="What else the chat template takes, as JSON: '{\"enable_thinking\": false}' for one.",
)
@click.option(
    "--max_output_len", type=click.IntRange(1), help="Output tokens at most.  [default: what max_seq_len leaves]"
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--top_k",
    type=click.IntRange(-1),
    default=0,
    show_default=True,
    help="Keep the k likeliest tokens; 0 or -1 keeps all.",
)
@click.option(
    "--top_p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Keep the likeliest tokens of this mass.",
)
@click.option(
    "--min_p",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Drop tokens below this share of the best.",
)
@click.option(
    "--repetition_penalty",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Divide the logits of tokens that prompt or output have; 1 is off.",
)
@click.option(
    "--presence_penalty",
    type=click.FloatRange(-2, 2),
    default=0.0,
    show_default=True,
    help="Lower the logits of tokens that the output has.",
)
@click.option(
    "--frequency_penalty",
    type=click.FloatRange(-2, 2),
    default=0.0,
    show_default=True,
    help="Lower them once for every time that it has them.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Makes sampling repeatable.  [default: drawn, and printed]"
)
@click.option("--n", type=click.IntRange(1), default=1, show_default=True, help="Outputs for every prompt.")
@click.option("--stop", multiple=True, help="Text that ends an output; may be given again.")
@click.option("--ignore_eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option(
    "--min_tokens",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Output tokens before one that ends the output may come.",
)
@click.option(
    "--logit_bias",
    callback=token_biases,
    default="{}",
    show_default=True,
    help="What is added to the logits of tokens, -100 to 100, as JSON by token id: '{\"5\": -100}' for one.",
)
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    help="With --format json, each token's log-probability and those of so many likeliest ones.",
)
@click.option("--json_schema", help="A JSON schema that outputs must match: JSON, or @FILE.")
@click.option("--regex", help="A regular expression that whole outputs match.")
@click.option(
    "--grammar",
    type=file,
    help="A file of a grammar that outputs follow, in llama.cpp's EBNF; its root rule is `root`.",
)
@click.option("--no_speculation", is_flag=True, help="Plain autoregressive decoding; the output is the same.")
@click.option(
    "--verify_window",
    type=click.IntRange(1),
    help="Tokens verified in a pass, the drafter's block size at most.  [default: adapts; the output is the same]",
)
@proposer
@device
@output_format
def run(
    engine_dir: Path,
    prompts: tuple[str, ...],
    raw_prompt: bool,
    chat_template_kwargs: dict[str, Any],
    max_output_len: int | None,
    no_speculation: bool,
    verify_window: int | None,
    json_schema: str | None,
    regex: str | None,
    grammar: Path | None,
    proposer: ProposerName,
    device: str | None,
    output_format: str,
    **sampling: Any,
) -> None:
    """Decode prompts, all together, and say what speculation did."""
    from dflash_trt.cli.progress import measure_passes
    from dflash_trt.runtime.llm import LLM
    from dflash_trt.runtime.sampling import SamplingParams

    if no_speculation and verify_window is not None:
        raise click.UsageError("--no_speculation and --verify_window exclude each other")
    if raw_prompt and chat_template_kwargs:
        raise click.UsageError("--raw_prompt and --chat_template_kwargs exclude each other")
    if sampling["logprobs"] is not None and output_format != "json":
        raise click.UsageError("--logprobs goes with --format json")
    form = _form(json_schema, regex, grammar)
    params = SamplingParams(max_tokens=max_output_len, structured_outputs=form, **sampling)
    with LLM(engine_dir, device=device, proposer=proposer) as llm:
        encoded = _encode(llm, prompts, None if raw_prompt else chat_template_kwargs)
        window = 1 if no_speculation else verify_window
        if window is None:
            measure_passes(llm)
        generation = _decode(llm.stream(encoded, params, verify_window=window))
    if output_format == "json":
        click.echo(json.dumps(as_json(prompts, generation), ensure_ascii=False))
    else:
        for prompt, output in zip(prompts, generation, strict=True):
            for completion in output.outputs:
                click.echo(f"> {prompt}\n{completion.text}\n")
        click.echo(_summary(generation, sampled=params.temperature > 0), err=True)
    _refuse_errors(generation)


def _form(json_schema: str | None, regex: str | None, grammar: Path | None) -> StructuredOutputs | None:
    """The form that outputs must have, if any."""
    from dflash_trt.runtime.structured import StructuredOutputs

    options = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"--{given[0]} and --{given[1]} exclude each other")
    if json_schema is not None:
        schema = _text(Path(json_schema[1:])) if json_schema.startswith("@") else json_schema
        return StructuredOutputs(json=schema)
    if regex is not None:
        return StructuredOutputs(regex=regex)
    return None if grammar is None else StructuredOutputs(grammar=_text(grammar))


def _text(file: Path) -> str:
    from dflash_trt.checkpoint.json_object import LARGEST_CONFIG
    from dflash_trt.checkpoint.regular_file import read_file

    try:
        return read_file(file, LARGEST_CONFIG).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not UTF-8") from None


def _encode(llm: LLM, prompts: Sequence[str], template: dict[str, Any] | None) -> list[str] | list[list[int]]:
    """Prompts as messages of a user, where the engine has a chat template and `template` is not None."""
    if template is None or llm.tokenizer.chat_template is None:
        return list(prompts)
    return [llm.encode_chat([{"role": "user", "content": prompt}], **template) for prompt in prompts]


def _decode(stream: TokenStream) -> Generation:
    from dflash_trt.cli.progress import count_progress

    with count_progress("decoding", stream.most_tokens) as advance:
        for _ in stream:
            advance(1)
    return stream.result()


def as_json(prompts: tuple[str, ...], generation: Generation) -> dict[str, Any]:
    """The object that `--format json` prints."""
    statistics = generation.statistics
    return {
        "outputs": [
            {
                "prompt": prompt,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "seed": completion.seed,
                **({} if completion.error is None else {"error": completion.error}),
                **(
                    {} if completion.logprobs is None else {"logprobs": [_logprobs(one) for one in completion.logprobs]}
                ),
            }
            for prompt, output in zip(prompts, generation, strict=True)
            for completion in output.outputs
        ],
        "stats": {
            "acceptance_length": statistics.acceptance_length,
            "draft_tokens": statistics.draft_tokens,
            "accepted_tokens": statistics.accepted_tokens,
            "output_tokens": statistics.output_tokens,
            "tokens_per_second": generation.tokens_per_second,
            "target_passes": generation.target_passes,
        },
    }


def _refuse_errors(generation: Generation) -> None:
    """Say which outputs ended in an error, once all have been printed.

    Raises:
        UserError: some did.
    """
    failed = [
        (index, completion.error)
        for index, output in enumerate(generation)
        for completion in output.outputs
        if completion.error is not None
    ]
    if failed:
        index, error = failed[0]
        others = f" (and {len(failed) - 1} more outputs ended in an error)" if len(failed) > 1 else ""
        raise UserError(f"prompt {index}: {error}{others}")


def _logprobs(found: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in found.top]
    return {"logprob": found.logprob, "top": top}


def _summary(generation: Generation, *, sampled: bool) -> str:
    statistics = generation.statistics
    length = statistics.acceptance_length
    seeds = ", ".join(str(completion.seed) for output in generation for completion in output.outputs)
    return (
        f"{statistics.output_tokens} tokens, {generation.tokens_per_second:.1f} tokens/s, acceptance length "
        f"{'-' if length is None else f'{length:.2f}'} ({statistics.accepted_tokens} of {statistics.draft_tokens} "
        f"draft tokens), {generation.target_passes} target passes" + (f", seed {seeds}" if sampled else "")
    )
