"""Train the model that ships as `vnext/demo_model`, from a fixed seed, on the documentation of the running Python.

Owns the tokenizer, the training loop and the exported checkpoint (Hugging Face layout, Llama architecture, bfloat16);
the text comes from `demo_corpus`. The forward below serves training only; the engine has its own.
`python scripts/train_demo_model.py --compile` reproduces the shipped model; another Python, torch or thread count changes
the text or the rounding, and so the weights. Without `--compile` it needs no C++ compiler and runs at about half the speed.
`--draft --out FOLDER` trains a smaller model that drafts for it, with the shipped tokenizer.
"""
from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy
import torch
from demo_corpus import END, END_OF_TEXT, SPECIAL_TOKENS, texts
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional

DEMO_MODEL = Path(__file__).resolve().parents[1] / "vnext" / "demo_model"
TOKENS_PER_STEP = 2048
SHORT_WINDOW, LONG_WINDOW = 256, 1024
LONG_EVERY = 4  # every fourth step sees whole contexts: far positions only at the end would disturb what the model has learnt
WARM_UP_SHARE = 0.02
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant, not ' + role) }}{% endif %}"
    "{{ '<|' + role + '|>' }}{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Weights = dict[str, torch.Tensor]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the model; a parallel size of 1, 2 or 4 divides heads, intermediate size and vocabulary."""

    vocabulary_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 640
    layer_count: int = 4
    head_count: int = 8
    kv_head_count: int = 4
    head_size: int = 32
    position_count_max: int = LONG_WINDOW
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5


DRAFT = Shape(hidden_size=96, intermediate_size=240, layer_count=1, head_count=3, kv_head_count=3)


def train_tokenizer(documents: list[str], vocabulary_size: int) -> Tokenizer:
    """Byte-level byte-pair encoding: any text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def initial_weights(shape: Shape, generator: torch.Generator) -> Weights:
    """Float32 weights under Hugging Face names; projections that write to the residual stream start smaller."""
    hidden, kv_size = shape.hidden_size, shape.kv_head_count * shape.head_size
    query_size, residual_scale = shape.head_count * shape.head_size, (2 * shape.layer_count) ** -0.5

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02 * scale

    weights = {"model.embed_tokens.weight": normal(shape.vocabulary_size, hidden)}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(shape.layer_count):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": normal(query_size, hidden),
            prefix + "self_attn.k_proj.weight": normal(kv_size, hidden),
            prefix + "self_attn.v_proj.weight": normal(kv_size, hidden),
            prefix + "self_attn.o_proj.weight": normal(hidden, query_size, residual_scale),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "mlp.gate_proj.weight": normal(shape.intermediate_size, hidden),
            prefix + "mlp.up_proj.weight": normal(shape.intermediate_size, hidden),
            prefix + "mlp.down_proj.weight": normal(hidden, shape.intermediate_size, residual_scale),
        }
    return weights


def rotate(states: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Rotary position embedding of [batch, heads, length, head_size], pairs half a head apart."""
    half = shape.head_size // 2
    angles = torch.outer(torch.arange(states.shape[2]), shape.rope_theta ** (-torch.arange(half) / half))
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def attend(hidden: torch.Tensor, weights: Weights, prefix: str, shape: Shape) -> torch.Tensor:
    batch, length, _ = hidden.shape

    def heads(name: str) -> torch.Tensor:
        projected = functional.linear(hidden, weights[f"{prefix}self_attn.{name}_proj.weight"])
        return projected.view(batch, length, -1, shape.head_size).transpose(1, 2)

    groups = shape.head_count // shape.kv_head_count
    key = rotate(heads("k"), shape).repeat_interleave(groups, dim=1)
    value = heads("v").repeat_interleave(groups, dim=1)
    mixed = functional.scaled_dot_product_attention(rotate(heads("q"), shape), key, value, is_causal=True)
    return functional.linear(mixed.transpose(1, 2).flatten(2), weights[f"{prefix}self_attn.o_proj.weight"])


def feed_forward(hidden: torch.Tensor, weights: Weights, prefix: str) -> torch.Tensor:
    gate = functional.silu(functional.linear(hidden, weights[f"{prefix}mlp.gate_proj.weight"]))
    up = functional.linear(hidden, weights[f"{prefix}mlp.up_proj.weight"])
    return functional.linear(gate * up, weights[f"{prefix}mlp.down_proj.weight"])


def forward(weights: Weights, tokens: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Logits [batch, length, vocabulary] of tokens [batch, length]: Llama (arXiv 2302.13971), embeddings tied."""

    def normed(states: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(states, (shape.hidden_size,), weights[name], shape.norm_epsilon)

    hidden = functional.embedding(tokens, weights["model.embed_tokens.weight"])
    for layer in range(shape.layer_count):
        prefix = f"model.layers.{layer}."
        hidden = hidden + attend(normed(hidden, prefix + "input_layernorm.weight"), weights, prefix, shape)
        hidden = hidden + feed_forward(normed(hidden, prefix + "post_attention_layernorm.weight"), weights, prefix)
    return functional.linear(normed(hidden, "model.norm.weight"), weights["model.embed_tokens.weight"])


def mean_loss(weights: Weights, windows: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Cross entropy in nats per token of windows [batch, length + 1]."""
    logits = forward(weights, windows[:, :-1], shape)
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def batches(documents: list[numpy.ndarray], window: int, rng: numpy.random.Generator) -> Iterator[torch.Tensor]:
    """Yield endless [TOKENS_PER_STEP / window, window + 1] batches, with the documents in a new order each epoch.

    Every second window starts at the start of a document, because the engine will see prompts at position 0.
    """
    count = TOKENS_PER_STEP // window
    while True:
        order = [documents[index] for index in rng.permutation(len(documents))]
        stream, starts = numpy.concatenate(order), numpy.cumsum([0, *map(len, order)])
        begins = numpy.arange(0, len(stream) - 2 * window, window)
        begins[1::2] = starts[numpy.searchsorted(starts, begins[1::2])]
        begins = rng.permutation(begins[begins < len(stream) - window])
        for chosen in begins[: len(begins) // count * count].reshape(-1, count):
            yield torch.from_numpy(stream[chosen[:, None] + numpy.arange(window + 1)])


@torch.no_grad()
def held_out_loss(weights: Weights, stream: numpy.ndarray, shape: Shape) -> float:
    """Nats per token over the whole held-out stream, in float32, in short windows."""
    usable = (len(stream) - 1) // SHORT_WINDOW * SHORT_WINDOW
    begins = numpy.arange(0, usable, SHORT_WINDOW)[:, None]
    windows = torch.from_numpy(stream[begins + numpy.arange(SHORT_WINDOW + 1)])
    return sum(mean_loss(weights, row[None], shape).item() for row in windows) / len(windows)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak; `progress` runs from 0 to 1."""
    if progress < WARM_UP_SHARE:
        return peak * (progress + 1e-3) / WARM_UP_SHARE
    share = min(1.0, (progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


def make_optimizer(weights: Weights) -> torch.optim.AdamW:
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(
    options: argparse.Namespace, weights: Weights, shape: Shape, documents: list[numpy.ndarray],
    report: Callable[[int, float], None],
) -> None:
    """Train in place; call `report(step, loss)` after every step with the training loss of the step."""
    optimizer, rng, started = make_optimizer(weights), numpy.random.default_rng(options.seed), time.monotonic()
    sources = {window: batches(documents, window, rng) for window in (SHORT_WINDOW, LONG_WINDOW)}
    loss_of = torch.compile(mean_loss, dynamic=False) if options.compile else mean_loss
    step = 0
    while (progress := progress_of(options, step, started)) < 1:
        window = LONG_WINDOW if step % LONG_EVERY == 0 else SHORT_WINDOW
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, options.learning_rate)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(weights, next(sources[window]), shape)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        report(step, loss.item())


def progress_of(options: argparse.Namespace, step: int, started: float) -> float:
    spent = (time.monotonic() - started) / 60 / options.minutes if options.minutes else 0.0
    return max(step / options.steps, spent)


def model_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layer_count, "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.kv_head_count, "head_dim": shape.head_size, "hidden_act": "silu",
        "max_position_embeddings": shape.position_count_max, "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": True, "use_cache": True,
        "bos_token_id": None, "eos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT), "torch_dtype": "bfloat16",
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.position_count_max,
        "bos_token": None, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {str(index): {"content": token, **flags} for index, token in enumerate(SPECIAL_TOKENS)},
    }


def export(folder: Path, weights: Weights, tokenizer: Tokenizer, shape: Shape) -> None:
    """Write the checkpoint; the weights appear by rename, so a reader never sees a partial file."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END)]
    files = {
        "config.json": model_config(shape),
        "generation_config.json": {"eos_token_id": ends, "pad_token_id": ends[0], "do_sample": False},
        "tokenizer_config.json": tokenizer_config(shape),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    rounded = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    part = folder / "model.safetensors.part"
    save_file(rounded, part, metadata={"format": "pt"})
    part.chmod(0o644)  # save_file leaves it readable by its owner only
    part.replace(folder / "model.safetensors")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled demo model on the documentation of this Python.")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL)
    parser.add_argument("--draft", action="store_true", help="train a draft model for the shipped model; wants --out")
    parser.add_argument("--steps", type=int, default=2600, help=f"optimizer steps of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more than one changes the rounding")
    parser.add_argument("--minutes", type=float, default=0.0, help="also end after this time (not reproducible)")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--compile", action="store_true", help="use torch.compile: twice as fast, wants a C++ compiler")
    parser.add_argument("--export-every", type=int, default=500, help="steps between held-out losses and exports")
    options = parser.parse_args()
    if options.draft and options.out == DEMO_MODEL:
        parser.error("--draft needs --out: a draft model may not replace the model")
    return options


def main() -> None:
    options, started = parse_options(), time.monotonic()
    shape = DRAFT if options.draft else Shape()
    torch.set_num_threads(options.threads)
    training, held_out = texts(options.seed)
    shipped = str(DEMO_MODEL / "tokenizer.json")
    tokenizer = Tokenizer.from_file(shipped) if options.draft else train_tokenizer(training, shape.vocabulary_size)

    def encoded(texts_: list[str]) -> list[numpy.ndarray]:
        return [numpy.array([*row.ids, 0]) for row in tokenizer.encode_batch(texts_)]  # id 0 ends a document

    documents, unseen = encoded(training), numpy.concatenate(encoded(held_out))
    bytes_per_token = sum(len(text.encode()) + 1 for text in held_out) / len(unseen)
    generator = torch.Generator().manual_seed(options.seed)
    weights = {name: weight.requires_grad_() for name, weight in initial_weights(shape, generator).items()}
    print(f"{sum(map(len, documents))} training tokens, {len(unseen)} held out, {bytes_per_token:.2f} bytes a token, "
          f"{sum(weight.numel() for weight in weights.values())} parameters", flush=True)

    def report(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step} loss {loss:.3f} after {(time.monotonic() - started) / 60:.1f} min", flush=True)
        if step % options.export_every == 0 and step < options.steps:
            save()

    def save() -> None:
        loss = held_out_loss(weights, unseen, shape)
        bits = loss / math.log(2) / bytes_per_token
        print(f"held-out loss {loss:.4f} nats a token, {bits:.4f} bits a byte", flush=True)
        export(options.out, weights, tokenizer, shape)

    train(options, weights, shape, documents, report)
    save()


if __name__ == "__main__":
    main()
