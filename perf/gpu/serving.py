"""The part `serving`: an engine of the 8 B Llama shape as a user starts it, `LLM(folder)`, beside transformers on the same GPU.

Owns the workloads: decodes of several sizes (the time of answers of 128 tokens less that of one token), one long prompt, and the
start. Weights are random, drawn on the GPU; speed depends on shapes alone. Prompts never repeat, so no prefix is found. A dry run
makes the same calls on the CPU with a toy and gives no figures.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perf.gpu.findings import Findings
from perf.gpu.report import PASSED, Verdict, figure
from perf.peers.shapes import SHAPES, write_checkpoint

ROWS, PEER_ROWS, TOY_ROWS = (1, 32, 256), (1, 32), (1, 3)
PROMPT, ANSWER, LONG = 128, 128, 8000
TOY = 8
"""A dry run divides these lengths by this."""
WEIGHT_STD = 0.02

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts of token ids and the length of every answer -> the answers."""


def serving(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Both engines, one after the other."""
    device, shape = ("cpu", "llama-tiny") if dry else ("cuda", "llama-8b")
    begin_s = time.perf_counter()
    write_checkpoint(SHAPES[shape], folder / "model", pieces=None if dry else drawn_on_gpu)
    findings.detail("checkpoint", {"shape": shape, "seconds": round(time.perf_counter() - begin_s, 1)})
    release()
    for engine, rows in ((vnext, TOY_ROWS if dry else ROWS), (transformers, TOY_ROWS if dry else PEER_ROWS)):
        for name, value, unit in measured(engine(folder / "model", device), rows, dry):
            findings.figures(figure(f"{engine.__name__}: {name}", None if dry else value, unit))
        release()
    return Verdict(PASSED)


def drawn_on_gpu(sizes: tuple[int, ...], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """A tensor as bfloat16 bits: ones for a norm, N(0, WEIGHT_STD^2) for a matrix."""
    generator = torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))
    made = torch.empty(sizes, dtype=torch.bfloat16, device="cuda")
    made = made.fill_(1) if len(sizes) == 1 else made.normal_(std=WEIGHT_STD, generator=generator)
    yield made.cpu().view(torch.int16).numpy().view(np.uint16)


def release() -> None:
    """Give memory back that this process's next engine, or another process, needs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(engine: Iterator[Generate], rows: tuple[int, ...], dry: bool) -> Iterator[tuple[str, float, str]]:
    """Name, value and unit of each figure. `engine` yields its function once, when it has started, and closes at its end."""
    share, rng = TOY if dry else 1, random.Random(11)
    begin_s = time.perf_counter()
    generate = next(engine)
    generate(drawn(rng, 1, PROMPT // share), 1)
    yield "start to the first token", time.perf_counter() - begin_s, "s"
    for count in rows:
        generate(drawn(rng, count, PROMPT // share), ANSWER // share)  # captures what it needs
        long_s, short_s = (timed(generate, drawn(rng, count, PROMPT // share), length) for length in (ANSWER // share, 1))
        yield f"decode of {count}", count * (ANSWER // share - 1) / (long_s - short_s), "tokens/s"
    generate(drawn(rng, 1, LONG // share), 1)
    yield f"prompt of {LONG}", LONG // share / timed(generate, drawn(rng, 1, LONG // share), 1), "tokens/s"
    engine.close()


def drawn(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(256, 3000) for _ in range(length)] for _ in range(count)]


def timed(generate: Generate, prompts: list[list[int]], length: int) -> float:
    """Seconds. AssertionError if an answer is not of that length."""
    begin_s = time.perf_counter()
    answers = generate(prompts, length)
    elapsed_s = time.perf_counter() - begin_s
    assert [len(answer) for answer in answers] == [length] * len(prompts), "an answer has another length"
    return elapsed_s


def vnext(model: Path, device: str) -> Iterator[Generate]:
    """The defaults of `LLM(...)`, but for a log in the model's folder."""
    from vnext import LLM, SamplingParams

    with LLM(model, device=device, log_dir=str(model / "log")) as llm:

        def generate(prompts: list[list[int]], length: int) -> list[list[int]]:
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

        yield generate


def transformers(model: Path, device: str) -> Iterator[Generate]:
    """`generate` with its defaults: eager, SDPA."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()

    def generate(prompts: list[list[int]], length: int) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            made = loaded.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=length, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        return made[:, len(prompts[0]) :].tolist()

    yield generate
