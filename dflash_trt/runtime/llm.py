"""The entry point of a program: an engine directory, prompts in, text out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from dflash_trt.checkpoint.encoding import encode_conversation, encode_text
from dflash_trt.checkpoint.message_forms import Message
from dflash_trt.engine.directory import open_engine
from dflash_trt.errors import UserError
from dflash_trt.runtime.detokenizer import Detokenizer
from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.generation import Generation, Prompt, TokenStream
from dflash_trt.runtime.grammar import GrammarMask
from dflash_trt.runtime.grammar_compiler import GrammarCompiler
from dflash_trt.runtime.lark import Lark
from dflash_trt.runtime.launch import open_executor
from dflash_trt.runtime.pass_costs import PassCosts, costs_file, measure, remember, remembered
from dflash_trt.runtime.proposer import ProposerName
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.runtime.window import AdaptiveWindow, FixedWindow, WindowPolicy

GREEDY = SamplingParams()


class LLM:
    """Decodes with an engine directory.

    An engine of several ranks is run by as many processes, which this one starts, unless torchrun or MPI has started
    them: then all must make their `LLM` alike. Rank 0 has it; in the others it does what rank 0 says, and exits.

    Args:
        engine_dir: what `dflash-trt build` wrote.
        device: where a torch engine runs; None is the first CUDA device, or the CPU where there is none. Of several
            ranks "cuda" gives each its own.
        proposer: what proposes draft tokens: the engine's drafter, or "ngram", prompt lookup, for which the drafter
            does not run. Output does not depend on it.

    Raises:
        UserError: the directory is no engine of this version, a file in it is damaged, or torchrun or MPI has started
            another number of processes than the engine has ranks.
        RanksEnded: a rank died.
    """

    def __init__(self, engine_dir: str | Path, *, device: str | None = None, proposer: ProposerName = "dflash") -> None:
        self.engine = open_engine(Path(engine_dir))
        self.tokenizer = self.engine.tokenizer()
        self.executor: Executor
        self.executor, end = open_executor(self.engine, device, proposer)
        self._end = weakref.finalize(self, end)
        self._costs_file = costs_file(self.engine, proposer)
        self._costs: PassCosts | None = None
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = Lock()
        self.slots_used_by: Scheduler | None = None
        """Whose sequences are in the caches, a call's or a server's: one at a time has them."""

    def close(self) -> None:
        """End the other ranks of an engine that has some; so do leaving a `with`, and this object's end.

        It is not to be used after that.
        """
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        verify_window: int | None = None,
    ) -> Generation:
        """Complete prompts, all decoded together as far as there are slots.

        Args:
            prompts: texts, encoded as they are, or lists of token ids. A single text is a list of one.
            params: one for all prompts, or one each.
            verify_window: tokens that a pass verifies for a request, 1 (no speculation) to the block size; None is what
                gives the most tokens a second, step by step. Output does not depend on it.

        Returns:
            An output for every prompt. Where one could not go on, its `finish_reason` is "error" and its `error` says
            why; others have theirs.

        Raises:
            UserError: a prompt is empty or too long, or a parameter is out of range.
        """
        return self.stream(prompts, params, verify_window=verify_window).result()

    def stream(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        verify_window: int | None = None,
    ) -> TokenStream:
        """`generate`, token by token."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if any(isinstance(prompt, int) for prompt in prompts):
            raise UserError("the prompts are one list of token ids; give a list of such lists")
        windows = self.windows(verify_window)
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one each")
        requests = [
            [self.new_request(prompt, one, where=f"prompt {index}") for one in each.each()]
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        scheduler = Scheduler(self.executor, windows)
        return TokenStream(prompts, requests, scheduler, partial(self._claim_slots, scheduler))

    def _claim_slots(self, scheduler: Scheduler) -> None:
        if scheduler.holds_slots and self.slots_used_by is not scheduler:
            raise RuntimeError("another call has used this LLM's slots since; finish a stream before the next call")
        self.slots_used_by = scheduler

    def windows(self, verify_window: int | None) -> WindowPolicy:
        """A window for all requests, or None: one that adapts, by what passes of this engine take on this machine.

        Raises:
            UserError: it is not 1 to the block size.
        """
        window = self._checked_window(verify_window)
        return FixedWindow(window) if window else AdaptiveWindow(self.executor.max_window, self.pass_costs())

    def pass_costs(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> PassCosts:
        """What decode steps of this engine take on this machine: remembered, or measured now.

        Args:
            on_progress: told how much of it is measured, which takes seconds and overwrites what is in slots.
        """
        if self._costs is None:
            self._costs = remembered(self._costs_file)
        if self._costs is None:
            self.slots_used_by = None
            self._costs = measure(self.executor, on_progress)
            remember(self._costs, self._costs_file)
        return self._costs

    def encode_chat(self, messages: Sequence[Message], /, **template_arguments: Any) -> list[int]:
        """The token ids of a conversation, up to where the assistant answers.

        Args:
            messages: each with "role" and "content".
            template_arguments: what else the engine's chat template takes, `enable_thinking=False` of Qwen3's for one:
                a drafter guesses well in the mode it was trained for.

        Raises:
            UserError: the engine has no chat template, or the template refuses the messages.
        """
        taken = {"conversation", "tokenize", "add_generation_prompt", "messages"} & template_arguments.keys()
        if taken:
            raise UserError(f"chat template argument {taken.pop()!r} is not the caller's to give")
        return encode_conversation(
            self.tokenizer, messages, str(self.engine.path), add_generation_prompt=True, **template_arguments
        )

    def require_form(self, form: StructuredOutputs | Lark) -> None:
        """See that outputs can have a form.

        Raises:
            UserError: the form is none, or no text has it.
        """
        self._grammar_compiler().mask(form)

    def new_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        where: str,
        priority: int = 0,
        deadline: float | None = None,
        verify_window: int | None = None,
    ) -> Request:
        """A request of this engine, checked.

        Args:
            prompt: a text, encoded as it is, or token ids.
            params: one of `SamplingParams.each`.
            where: what a refusal names.
            priority, deadline, verify_window: as `Request` has them.

        Raises:
            UserError: the prompt is empty, too long or has ids that are none, or a parameter does not fit the engine.
        """
        ids = encode_text(self.tokenizer, prompt, where) if isinstance(prompt, str) else list(prompt)
        target, limit = self.engine.config.pretrained_config, self.executor.max_seq_len
        if not ids:
            raise UserError(f"{where}: is empty; it needs at least one token")
        if not all(isinstance(token, int) and 0 <= token < target.vocab_size for token in ids):
            raise UserError(f"{where}: its ids must be integers inside the vocabulary of {target.vocab_size}")
        if len(ids) >= limit:
            raise UserError(
                f"{where}: has {len(ids)} tokens; the engine's max_seq_len of {limit} leaves room for "
                f"{limit - 1} and one of output"
            )
        for name, tokens in (("logit_bias[{}]", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            strange = next((token for token in tokens if not 0 <= token < target.vocab_size), None)
            if strange is not None:
                where = name.format(strange)
                raise UserError(f"{where}: {strange} is no token; they are 0 to {target.vocab_size - 1}")
        eos = () if params.ignore_eos else target.eos_token_ids
        return Request(
            ids,
            params,
            limit=limit,
            stop_token_ids={*eos, *params.stop_token_ids},
            detokenizer=Detokenizer(self.tokenizer, params.stop, prompt=ids, min_tokens=params.min_tokens),
            vocab_size=target.vocab_size,
            grammar=self._grammar(params),
            priority=priority,
            deadline=deadline,
            verify_window=self._checked_window(verify_window),
        )

    def _grammar(self, params: SamplingParams) -> GrammarMask | None:
        form = params.structured_outputs
        if form is None:
            return None
        return self._grammar_compiler().mask(form)

    def _grammar_compiler(self) -> GrammarCompiler:
        """Made when first needed: it reads the whole vocabulary."""
        with self._compiler_lock:
            if self._compiler is None:
                target = self.engine.config.pretrained_config
                self._compiler = GrammarCompiler(self.tokenizer, target.vocab_size, target.eos_token_ids)
            return self._compiler

    def _checked_window(self, window: int | None) -> int | None:
        most = self.executor.max_window
        if window is not None and not 1 <= window <= most:
            raise UserError(f"verify_window is {window}, it must be 1 to {most}, the drafter's block size")
        return window
