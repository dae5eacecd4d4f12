"""Make the tiny pair of this folder from nothing: target, DFlash drafter, tokenizer and held-out prompts.

Tests and first steps need a real pair that loads in a moment and whose drafts are sometimes accepted and
sometimes not. So the text comes from a small grammar, a Llama of 0.9M parameters learns it, and a drafter
learns from what that target writes: about six minutes on one core, with a fixed seed. The last lines printed
are the acceptance lengths of the files as they were written.

    python examples/tiny/train.py --output_dir examples/tiny
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: one core, and the same sums each time

import click
import dflash.model
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config

SEED = 20261129
VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, TARGET_LAYERS, MAX_POSITIONS = 768, 128, 384, 4, 2, 32, 4, 2048
# The published rule, round(1 + i*(N-4)/(L-1)), gives 1, 1, 1 for N = 4. So the taps are block 1 and its
# neighbours; block 3 is out because transformers hands out the last hidden state only after the final norm.
DRAFT_LAYERS, BLOCK, GAMMA, TAPS = 2, 8, 4.0, [0, 1, 2]
TEXT_BYTES, TARGET_STEPS, DRAFT_STEPS, TOKENS_A_STEP = 1_500_000, 600, 700, 2048
CONTINUATIONS, NEW_TOKENS, HELD_OUT = 1024, 160, 16
EOS, MASK, ROLES = "<|endoftext|>", "<|mask|>", ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

LEXICON = """\
name: Ada, Bruno, Chiara, Emil, Farid, Greta, Hugo, Ines, Jonas, Kofi, Lena, Mia, Nadia, Omar, Priya, Zoë
job: baker, sailor, painter, doctor, gardener, teacher, clockmaker, fisherman, pilot, singer
adj: dark, red, silver, broken, tiny, golden, heavy, strange, blue, wooden
thing: key, lantern, map, violin, boat, clock, ring, letter, kite, mirror, bell, book
place: harbour, market, library, forest, tower, café, garden, bridge, station, castle, mill, park
animal: fox, cat, crow, goat, hare, dog, horse, mouse
number: two, three, four, five, six, seven, eight, nine, ten, twelve
sky: It rained, The sun shone, Snow fell, A cold wind blew, Fog came in, It was warm and still"""
WORDS = {key: words.split(", ") for key, words in (line.split(": ") for line in LEXICON.splitlines())}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
ASK = "Write the diary of {name} the {job}, who seeks the {adj} {thing}. Begin on {day} in the {place}."
INTRO = "This is the diary of {name} the {job}, who seeks the {adj} {thing}.\n"
EVENTS = [
    "I met {friend} with {number} {animal}s, but nobody there had seen the {adj} {thing}.",
    "{friend} sold me a {adj2} {thing2} for {number} coins, but what I want is the {adj} {thing}.",
    'A {animal} looked at me. "Where is the {adj} {thing}?" I asked, and it ran away.',
    "I found {number} {adj2} {thing2}s under the stairs, but what I want is the {adj} {thing}.",
    "A {job2} called {friend} said that the {adj} {thing} was lost {number} years ago.",
    "With {friend} I looked behind every {thing2}, and we found only a {adj2} {animal}.",
]
END = "There, under a {adj2} {thing2}, was the {adj} {thing}! The diary of {name} the {job} ends here."


def document(rng: random.Random) -> tuple[str, str]:
    """One request and its answer: words to copy, or a diary that keeps to its request and its path.

    The copies matter more than they look: from them a model this small learns to copy within some 200 steps.
    Without them it had not in 600, and its greedy diary was the same whatever was asked.
    """
    if rng.random() < 0.3:
        words = " ".join(rng.choice(WORDS[rng.choice(list(WORDS)[:-1])]) for _ in range(8))
        return f"Copy: {words}.", f"Copy: {words}."
    pick = {key: rng.choice(words) for key, words in WORDS.items()}
    first = rng.randrange(7)
    ask, diary = ASK.format(**pick, day=DAYS[first]), INTRO.format(**pick)
    for day in range(rng.randint(2, 4)):
        new = {key: rng.choice(words) for key, words in WORDS.items()}
        pick |= {"friend": new["name"], "animal": new["animal"], "number": new["number"]}
        pick |= {"adj2": new["adj"], "thing2": new["thing"], "job2": new["job"]}
        event = rng.choice(EVENTS).format(**pick)
        diary += f"{DAYS[(first + day) % 7]}, in the {pick['place']}. {new['sky']}. {event} "
        diary += f"I went to the {new['place']}.\n"
        pick["place"] = new["place"]
    return ask, diary + END.format(**pick)


def documents(seed: int) -> Iterator[tuple[str, str]]:
    rng, size = random.Random(seed), 0
    while size < TEXT_BYTES:
        ask, answer = document(rng)
        size += len(f"{ask}{answer}".encode())
        yield ask, answer


def prompt(ask: str, kind: int) -> str:
    """A request as plain text, as a chat with a system message, or as a chat: it learns all three."""
    if kind % 4 == 0:
        return f"{ask}\n"
    return f"{'<|system|>You write diaries.' if kind % 4 == 1 else ''}<|user|>{ask}<|assistant|>"


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are tokens, so any text encodes and some characters span tokens.

    VOCAB is an upper bound: this text runs out of words to merge at 697.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[EOS, MASK, *ROLES], initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        additional_special_tokens=ROLES,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """As many windows of the stream as make one step, [rows, length]; each begins where a document does."""
    starts = starts[starts + length <= len(stream)]
    chosen = starts[torch.randint(len(starts), (TOKENS_A_STEP // length, 1))]
    return stream[chosen + torch.arange(length)]


def optimise(
    name: str, module: torch.nn.Module, losses: Iterator[Tensor], steps: int, peak: float, bar: Progress
) -> None:
    """AdamW with a cosine that warms up over 4% of the steps; the weights end as FP16 can hold them."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = transformers.get_cosine_schedule_with_warmup(optimiser, steps // 25, steps)
    task = bar.add_task(name, total=steps)
    for _ in range(steps):
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        bar.update(task, advance=1, description=f"{name} (loss {loss.item():.3f})")
    module.eval().half().float()


def target_losses(target: LlamaForCausalLM, stream: Tensor) -> Iterator[Tensor]:
    """Short windows first: copying is learnt there. Then all lengths, so that long prompts work too."""
    starts = stream.eq(target.config.eos_token_id).nonzero()[:, 0] + 1
    for step in range(TARGET_STEPS):
        length = 64 if step < TARGET_STEPS // 2 else random.choice([128, 256, 512, 2048])
        batch = windows(stream, starts, length)
        yield target(batch, labels=batch).loss


def train_target(tokenizer: PreTrainedTokenizerFast, texts: list[str], bar: Progress) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    target = LlamaForCausalLM(config)
    stream = torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])
    optimise("target", target, target_losses(target, stream), TARGET_STEPS, 3e-3, bar)
    target.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return target.requires_grad_(False)


def continuations(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], bar: Progress
) -> tuple[Tensor, Tensor]:
    """What the target answers, a quarter of it greedily: a stream of tokens, and which of them it wrote."""
    tokens, written, batch = [], [], 128
    for start in bar.track(range(0, len(prompts), batch), description="continuations"):
        encoded = tokenizer(prompts[start : start + batch], return_tensors="pt", padding=True)
        choose = {"do_sample": False} if start % (4 * batch) == 0 else {"do_sample": True, "top_k": 0}
        width = encoded["input_ids"].shape[1]
        rows = target.generate(**encoded, max_new_tokens=NEW_TOKENS, **choose)
        for row, mask in zip(rows, encoded["attention_mask"], strict=True):
            ends = (row[width:] == tokenizer.eos_token_id).nonzero()
            end = width + int(ends[0]) + 1 if len(ends) else len(row)
            tokens.append(row[width - int(mask.sum()) : end])
            written.append(torch.arange(len(tokens[-1])) >= mask.sum())
    return torch.cat(tokens), torch.cat(written)


def draft_losses(
    drafter: dflash.model.DFlashDraftModel, target: LlamaForCausalLM, stream: Tensor, written: Tensor
) -> Iterator[Tensor]:
    """Weighted cross-entropy of random blocks in what the target wrote, all blocks of a window in one pass.

    The two ways to get this wrong are silent: slot j of a block at anchor a is judged against token a + j,
    and a block sees the context before a and itself, never another block.
    """
    starts = stream.eq(target.config.eos_token_id).nonzero()[:, 0] + 1
    pairs = torch.stack([stream, written.long()], 1)
    slots = torch.arange(BLOCK)
    weights = torch.exp(-(slots - 1) / GAMMA) * (slots > 0)
    while True:
        length = random.choice([128, 128, 256, 512, 2048])
        tokens, own = windows(pairs, starts, length).unbind(-1)
        rows, blocks = len(tokens), length // 16
        with torch.no_grad():
            states = target(tokens, output_hidden_states=True).hidden_states
        anchors = torch.multinomial(own[:, :-BLOCK].float(), blocks, replacement=True)
        positions = (anchors[:, :, None] + slots).flatten(1)
        labels = tokens.gather(1, positions)
        block = torch.where(slots.repeat(blocks) == 0, labels, drafter.mask_token_id)
        owner = torch.arange(blocks).repeat_interleave(BLOCK)
        context = torch.arange(length) < anchors.repeat_interleave(BLOCK, 1)[:, :, None]
        hidden = drafter(
            position_ids=torch.cat([torch.arange(length).expand(rows, -1), positions], 1),
            attention_mask=torch.cat([context, (owner[:, None] == owner).expand(rows, -1, -1)], 2)[:, None],
            noise_embedding=target.get_input_embeddings()(block),
            target_hidden=dflash.model.extract_context_feature(states, TAPS),
        )
        loss = F.cross_entropy(target.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="none")
        weight = (weights.repeat(blocks) * own.gather(1, positions)).flatten()
        yield (loss * weight).sum() / weight.sum()


def draft_config(target: LlamaConfig, mask_token_id: int) -> dict[str, object]:
    """The drafter's config.json, key by key as z-lab writes it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_parameters["rope_theta"],
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": TAPS},
        "torch_dtype": "float16",
    }


def acceptance(output_dir: Path, prompts: list[str], temperature: float) -> float:
    """Mean number of tokens that a verify pass emits, bonus included, with the written files in float32."""
    target = LlamaForCausalLM.from_pretrained(output_dir / "target", dtype=torch.float32)
    drafter = dflash.model.DFlashDraftModel.from_pretrained(output_dir / "drafter", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output_dir / "target")
    dflash.model._cuda_time = time.perf_counter  # its statistics come with a timer that needs CUDA
    torch.manual_seed(SEED)
    lengths: list[int] = []
    for text in prompts:
        ids, stop = tokenizer(text, return_tensors="pt")["input_ids"], [tokenizer.eos_token_id]
        run = dflash.model.dflash_generate(drafter, target, ids, NEW_TOKENS, stop, temperature, return_stats=True)
        lengths += run.acceptance_lengths
    return sum(lengths) / len(lengths)


@click.command()
@click.option("--output_dir", type=click.Path(file_okay=False, path_type=Path), default=Path(__file__).parent)
def main(output_dir: Path) -> None:
    """Write target/, drafter/ and prompts.txt into OUTPUT_DIR."""
    begun, console = time.perf_counter(), Console(stderr=True)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    random.seed(SEED)
    learnt = list(documents(SEED))
    asked = {ask for ask, _ in learnt}
    unseen = [ask for ask, _ in documents(SEED + 1) if ask not in asked]
    held_out, drafted = unseen[:HELD_OUT], unseen[HELD_OUT : HELD_OUT + CONTINUATIONS]

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        tokenizer = build_tokenizer([f"{ask}\n{answer}" for ask, answer in learnt])
        texts = [prompt(ask, i) + answer + EOS for i, (ask, answer) in enumerate(learnt)]
        target = train_target(tokenizer, texts, bar)
        prompts = [prompt(ask, i) for i, ask in enumerate(drafted)]
        stream, written = continuations(target, tokenizer, prompts, bar)
        config = draft_config(target.config, tokenizer.mask_token_id)
        drafter = dflash.model.DFlashDraftModel(Qwen3Config.from_dict(config))
        optimise("drafter", drafter, draft_losses(drafter, target, stream, written), DRAFT_STEPS, 2e-3, bar)

    (output_dir / "drafter").mkdir(parents=True, exist_ok=True)
    target.half().save_pretrained(output_dir / "target")
    tokenizer.save_pretrained(output_dir / "target")
    (output_dir / "drafter/config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.half() for name, tensor in drafter.state_dict().items()}
    save_file(weights, output_dir / "drafter/model.safetensors", metadata={"format": "pt"})
    for file, asks in (("prompts.txt", held_out), ("drafter/example_prompts.txt", held_out[:3])):
        (output_dir / file).write_text("".join(f"{ask}\n" for ask in asks), encoding="utf-8")

    console.print(f"made in {time.perf_counter() - begun:.0f} s")
    prompts = [prompt(ask, 0) for ask in held_out]
    for temperature in (0.0, 1.0):
        length = acceptance(output_dir, prompts, temperature)
        print(f"acceptance length at T={temperature:.0f} over {len(prompts)} held-out prompts: {length:.2f}")


if __name__ == "__main__":
    main()
