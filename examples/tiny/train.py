"""Make the tiny pair of this folder from nothing: a target, its DFlash drafter, a tokenizer and held-out prompts.

Tests and first steps need a real pair that loads in a moment and accepts real drafts. So the text comes from a small
grammar, a Llama of 0.85M parameters learns it, and a drafter learns from what that target writes: about six minutes on
one core, with a fixed seed. The last lines printed are the acceptance lengths of the files as they were written.

    python examples/tiny/train.py --output_dir examples/tiny
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read when torch is loaded: contending threads are ruinous here

import click
import dflash.model
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    get_cosine_schedule_with_warmup,
)

SEED = 20261129
TEXT_BYTES, COPY_SHARE = 1_500_000, 0.3
VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, TARGET_LAYERS, MAX_POSITIONS = 768, 128, 384, 4, 2, 32, 4, 2048
# The published rule, round(1 + i*(N-4)/(L-1)), gives 1, 1, 1 for N = 4. These are the three blocks around it that are
# not the last one, whose hidden state transformers hands out only after the final norm.
DRAFT_LAYERS, BLOCK, GAMMA, TAPS = 2, 8, 4.0, [0, 1, 2]
TARGET_STEPS, DRAFT_STEPS, WINDOW = 620, 900, 256
CONTINUATIONS, NEW_TOKENS, ANCHORS = 1536, 224, 16
EOS, MASK, ROLES = "<|endoftext|>", "<|mask|>", ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

WORDS = {
    "name": ["Ada", "Bruno", "Chiara", "Emil", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mia", "Nadia", "Omar", "Priya", "Zoë"],
    "job": ["baker", "sailor", "painter", "doctor", "gardener", "teacher", "clockmaker", "fisherman", "pilot", "singer"],
    "adj": ["dark", "red", "silver", "broken", "tiny", "golden", "heavy", "strange", "blue", "wooden"],
    "thing": ["key", "lantern", "map", "violin", "boat", "clock", "ring", "letter", "kite", "mirror", "bell", "book"],
    "place": ["harbour", "market", "library", "forest", "tower", "café", "garden", "bridge", "station", "castle", "mill", "park"],
    "animal": ["fox", "cat", "crow", "goat", "hare", "dog", "horse", "mouse"],
    "number": ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve"],
    "sky": [
        "It rained",
        "The sun shone",
        "Snow fell",
        "A cold wind blew",
        "Fog came in",
        "It was warm and still",
    ],
}
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
    """One request and its answer: a list to be copied, or a diary in which names and places are carried through."""
    if rng.random() < COPY_SHARE:
        words = " ".join(rng.choice(WORDS[rng.choice(list(WORDS))]) for _ in range(rng.randint(6, 20)))
        return f"Copy: {words}.", words + "."
    pick = {key: rng.choice(words) for key, words in WORDS.items()}
    first = rng.randrange(7)
    ask, diary = ASK.format(**pick, day=DAYS[first]), INTRO.format(**pick)
    for day in range(rng.randint(2, 4)):
        new = {key: rng.choice(words) for key, words in WORDS.items()}
        pick |= {"friend": new["name"], "animal": new["animal"], "number": new["number"], "next": new["place"]}
        pick |= {"adj2": new["adj"], "thing2": new["thing"], "job2": new["job"]}
        event = rng.choice(EVENTS).format(**pick)
        diary += f"{DAYS[(first + day) % 7]}, in the {pick['place']}. {new['sky']}. {event} I went to the {pick['next']}.\n"
        pick["place"] = pick["next"]
    return ask, diary + END.format(**pick)


def documents(seed: int, count_bytes: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    while count_bytes > 0:
        ask, diary = document(rng)
        count_bytes -= len(f"{ask}\n{diary}".encode())
        yield ask, diary


def prompt(ask: str, kind: int) -> str:
    """A request as plain text, as a chat, or as a chat under a system message: the target learns all three."""
    if kind == 0:
        return f"{ask}\n"
    return f"{'<|system|>You write diaries.' if kind == 1 else ''}<|user|>{ask}<|assistant|>"


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are tokens, so any text can be encoded and some characters span two tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [EOS, MASK, *ROLES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    )
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


def optimise(
    name: str, module: torch.nn.Module, losses: Iterator[Tensor], steps: int, peak: float, bar: Progress
) -> None:
    """AdamW with a cosine that warms up over 4% of the steps."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(optimiser, steps // 25, steps)
    task = bar.add_task(name, total=steps)
    for _ in range(steps):
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        bar.update(task, advance=1, description=f"{name} (loss {loss.item():.3f})")
    module.eval()
    with torch.no_grad():  # what follows must see the weights that are written
        for parameter in module.parameters():
            parameter.copy_(parameter.half())


def target_losses(target: LlamaForCausalLM, stream: Tensor) -> Iterator[Tensor]:
    while True:
        starts = torch.randint(len(stream) - WINDOW, (8, 1))
        batch = stream[starts + torch.arange(WINDOW)]
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
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    target = LlamaForCausalLM(config)
    stream = torch.tensor(tokenizer("".join(texts))["input_ids"])
    optimise("target", target, target_losses(target, stream), TARGET_STEPS, 4e-3, bar)
    target.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True, temperature=1.0
    )
    return target


@torch.inference_mode()
def continuations(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], bar: Progress
) -> list[tuple[Tensor, Tensor, int]]:
    """What the target writes, a quarter of it greedily: (tokens, features, prompt length) of each prompt."""
    samples, batch = [], 128
    for start in bar.track(range(0, len(prompts), batch), description="continuations"):
        encoded = tokenizer(prompts[start : start + batch], return_tensors="pt", padding=True)
        sampled = start % (4 * batch) > 0
        rows = target.generate(**encoded, max_new_tokens=NEW_TOKENS, do_sample=sampled, top_k=0)
        for row, mask in zip(rows, encoded["attention_mask"]):
            row = row[int((mask == 0).sum()) :]
            prompt_length = int(mask.sum())
            ends = (row[prompt_length:] == tokenizer.eos_token_id).nonzero()
            row = row[: prompt_length + int(ends[0]) + 1] if len(ends) else row
            states = target(row[None], output_hidden_states=True).hidden_states
            samples.append((row, dflash.model.extract_context_feature(states, TAPS)[0].half(), prompt_length))
    return samples


def draft_losses(
    drafter: dflash.model.DFlashDraftModel,
    target: LlamaForCausalLM,
    samples: list[tuple[Tensor, Tensor, int]],
) -> Iterator[Tensor]:
    """Weighted cross-entropy of every block, all blocks of a sequence in one pass.

    The two ways to get this wrong are silent: slot j of a block at anchor a is judged against token a + j, and a block
    sees the context before a and itself, never another block.
    """
    slots = torch.arange(BLOCK)
    weights = torch.exp(-(slots - 1) / GAMMA) * (slots > 0)
    while True:
        chosen = random.sample(samples, 8)
        length = max(len(tokens) for tokens, _, _ in chosen)
        features = torch.stack([F.pad(f.float(), (0, 0, 0, length - len(f))) for _, f, _ in chosen])
        tokens = torch.stack([F.pad(t, (0, length + BLOCK - len(t)), value=-100) for t, _, _ in chosen])
        anchors = torch.stack([torch.randint(p, len(t) - 1, (ANCHORS,)) for t, _, p in chosen])

        positions = (anchors[:, :, None] + slots).flatten(1)
        labels = tokens.gather(1, positions).view(-1, ANCHORS, BLOCK)
        block = torch.full_like(labels, drafter.mask_token_id)
        block[:, :, 0] = labels[:, :, 0]
        owner = torch.arange(ANCHORS).repeat_interleave(BLOCK)
        before = torch.arange(length) < anchors.repeat_interleave(BLOCK, 1)[:, :, None]
        own = (owner[:, None] == owner).expand(len(chosen), -1, -1)
        hidden = drafter(
            position_ids=torch.cat([torch.arange(length).expand(len(chosen), -1), positions], 1),
            attention_mask=torch.cat([before, own], 2)[:, None],
            noise_embedding=target.get_input_embeddings()(block.flatten(1)),
            target_hidden=features,
        )
        loss = F.cross_entropy(target.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="none")
        weight = weights * (labels != -100)
        yield (loss.view_as(weight) * weight).sum() / weight.sum()


def draft_config(target: LlamaForCausalLM, mask_token_id: int) -> dict[str, object]:
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
        "rms_norm_eps": target.config.rms_norm_eps,
        "rope_theta": target.config.rope_parameters["rope_theta"],
        "vocab_size": target.config.vocab_size,
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
    """Mean tokens a verify pass emits, the bonus included, of the written files in float32."""
    target = LlamaForCausalLM.from_pretrained(output_dir / "target", dtype=torch.float32)
    drafter = dflash.model.DFlashDraftModel.from_pretrained(output_dir / "drafter", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output_dir / "target")
    dflash.model._cuda_time = time.perf_counter  # its statistics come with a timer that needs CUDA
    torch.manual_seed(SEED)
    lengths: list[int] = []
    for text in prompts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        stop = [tokenizer.eos_token_id]
        lengths += dflash.model.dflash_generate(
            drafter.eval(), target, ids, NEW_TOKENS, stop, temperature, return_stats=True
        ).acceptance_lengths
    return sum(lengths) / len(lengths)


@click.command()
@click.option("--output_dir", type=click.Path(file_okay=False, path_type=Path), default=Path(__file__).parent)
def main(output_dir: Path) -> None:
    """Write target/, drafter/ and prompts.txt into OUTPUT_DIR."""
    begun = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random.seed(SEED)
    learnt = list(documents(SEED, TEXT_BYTES))
    asked = {ask for ask, _ in learnt}
    unseen = [ask for ask, _ in documents(SEED + 1, TEXT_BYTES) if ask not in asked]
    held_out, drafted = unseen[:16], unseen[16 : 16 + CONTINUATIONS]
    texts = [prompt(ask, i % 4) + diary + EOS for i, (ask, diary) in enumerate(learnt)]

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        tokenizer = build_tokenizer([f"{ask}\n{diary}" for ask, diary in learnt])
        target = train_target(tokenizer, texts, bar).requires_grad_(False)
        samples = continuations(target, tokenizer, [prompt(ask, i % 4) for i, ask in enumerate(drafted)], bar)
        config = draft_config(target, tokenizer.mask_token_id)
        drafter = dflash.model.DFlashDraftModel(Qwen3Config(**config))
        optimise("drafter", drafter, draft_losses(drafter, target, samples), DRAFT_STEPS, 2e-3, bar)

    (output_dir / "drafter").mkdir(parents=True, exist_ok=True)
    target.half().save_pretrained(output_dir / "target")
    tokenizer.save_pretrained(output_dir / "target")
    (output_dir / "drafter/config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.half() for name, tensor in drafter.state_dict().items()}
    save_file(weights, output_dir / "drafter/model.safetensors", metadata={"format": "pt"})
    (output_dir / "prompts.txt").write_text("".join(f"{ask}\n" for ask in held_out))

    console.print(
        f"made in {time.perf_counter() - begun:.0f} s; acceptance length over {len(held_out)} held-out prompts:"
    )
    for temperature in (0.0, 1.0):
        print(
            f"T={temperature:.0f}: {acceptance(output_dir, [prompt(ask, 0) for ask in held_out], temperature):.2f}"
        )


if __name__ == "__main__":
    main()
