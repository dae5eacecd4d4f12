"""Which slot of an executor's caches holds what."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.kept import KeptSequences, Match, common_prefix
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import Sampling


@dataclass(eq=False)
class Prefill:
    """A prompt under way."""

    request: Request
    slot: int
    sampling: Sampling
    kv_len: int
    """Tokens of it that are in the slot's caches."""


class Slots:
    """Requests that decode in front, request i of `running` in slot i; prompts and kept sequences somewhere behind.

    Args:
        executor: whose slots they are.
        count: how many of them are used.
        reuse_prefixes: keep what has ended while its slot is not needed, and begin prompts with what they share with
            the most similar of these, or of what is running.
    """

    def __init__(self, executor: Executor, count: int, *, reuse_prefixes: bool) -> None:
        self.running: list[Request] = []
        self.prompts: list[Prefill] = []
        """Those under way."""
        self.kept = KeptSequences()
        self.prefix_queries = 0
        """Prompt tokens of requests that got a slot, where prefixes are reused."""
        self.prefix_hits = 0
        """Those of them that were in the caches."""
        self._executor = executor
        self._count = count
        self._reuse_prefixes = reuse_prefixes

    def admit(self, request: Request) -> Prefill:
        """A slot for a request, and in it what it shares with another sequence."""
        match = self._match(request)
        shared = 0 if match is None else match.length
        if match is not None and match.is_whole:
            self.kept.take(slot := match.slot)
        else:
            slot = len(self.running)
            self._clear(slot)
            if match is not None and slot != match.slot:
                self._executor.move_slot(match.slot, slot, shared)
        if self._reuse_prefixes:
            self.prefix_queries += request.prompt_length
            self.prefix_hits += shared
        prompt = Prefill(request, slot, Sampling.of([request.params], [request.edits]), shared)
        self.prompts.append(prompt)
        return prompt

    def rest(self, request: Request) -> int:
        """Tokens of a prompt that the caches do not have."""
        match = self._match(request)
        return request.prompt_length - (0 if match is None else match.length)

    def is_short(self, request: Request, *, before: Prefill | None = None) -> bool:
        """Whether what the caches do not have of a prompt is a single chunk, also once `before` has stepped aside.

        What the caches have of it counts as used, and stays longest.
        """
        chunk = self._executor.max_num_tokens
        if request.prompt_length <= chunk:
            return True
        match = self._match(request)
        if match is None or request.prompt_length - match.length > chunk:
            return False
        in_the_way = before is not None and before.slot == len(self.running)
        is_lost = in_the_way and match.slot in self.kept and len(self.kept) == 1 and not self._free()
        return not is_lost

    def step_aside(self, prompt: Prefill) -> None:
        """Leave the first slot behind those that decode to one who will decode before."""
        if prompt.slot == len(self.running):
            free = self._free()
            slot = free[-1] if free else self.kept.evict()
            self._executor.move_slot(prompt.slot, slot, prompt.kv_len)
            prompt.slot = slot

    def start(self, prompt: Prefill) -> None:
        """Let a request decode. Others may have ended while its prompt ran, and left a hole before it."""
        slot = len(self.running)
        if slot < prompt.slot:
            self._clear(slot)
            self._executor.move_slot(prompt.slot, slot, prompt.kv_len)
        self.prompts.remove(prompt)
        self.running.append(prompt.request)

    def leave(self, prompt: Prefill) -> None:
        """Give up the slot of a prompt whose request has ended."""
        self.prompts.remove(prompt)
        if self._reuse_prefixes and prompt.request.error is None:
            self.kept.keep(prompt.slot, prompt.request.tokens[: prompt.kv_len])

    def retire(self) -> list[Request]:
        """Take those that have ended out of `running`, and close the holes that they leave."""
        ended = []
        for slot in reversed(range(len(self.running))):
            if self.running[slot].finish_reason is None:
                continue
            ended.append(self.running[slot])
            if self._reuse_prefixes and self.running[slot].error is None:
                self._keep(slot)
            last = self.running.pop()
            if slot < len(self.running):
                self._executor.move_slot(len(self.running), slot, last.kv_len)
                self.running[slot] = last
        return ended

    def _match(self, request: Request) -> Match | None:
        """What shares the most tokens with a prompt: a kept sequence, or one that is running and goes on.

        The last token of a prompt is run in any case: what follows it is chosen from its logits.
        """
        if not self._reuse_prefixes:
            return None
        prompt = request.tokens[: request.prompt_length - 1]
        found = self.kept.match(prompt)
        for slot, other in enumerate(self.running):
            length = min(common_prefix(other.tokens, prompt), other.kv_len)
            if length > (0 if found is None else found.length):
                found = Match(slot, length, is_whole=False)
        return found

    def _keep(self, slot: int) -> None:
        """Keep the sequence of a running slot, which another may be about to fill."""
        tokens = self.running[slot].tokens[: self.running[slot].kv_len]
        home = slot
        if slot < len(self.running) - 1:
            free = self._free() or ([self.kept.evict()] if self.kept else [])
            if not free:
                return
            home = free[-1]
            self._executor.move_slot(slot, home, len(tokens))
        self.kept.keep(home, tokens)

    def _clear(self, slot: int) -> None:
        """Let a kept sequence go elsewhere; where no slot is free, the least recently used is lost."""
        if slot not in self.kept:
            return
        free = self._free() or [self.kept.evict()]
        if free[-1] != slot:
            tokens = self.kept.take(slot)
            self._executor.move_slot(slot, free[-1], len(tokens))
            self.kept.keep(free[-1], tokens)

    def _free(self) -> list[int]:
        """Slots that hold nothing."""
        under_way = [prompt.slot for prompt in self.prompts]
        behind = range(len(self.running), self._count)
        return [slot for slot in behind if slot not in self.kept and slot not in under_way]
