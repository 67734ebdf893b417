"""How often a sampled draft is right: the product's draw beside a Gumbel coupling and beside the bounds of any coupling.

`python -m perf.record bench_draft_draws draft-draws`. A draft is right where the draft model and the model draw the same token by
the same words. For distributions p and q at total variation distance TV no coupling is right more often than 1 - TV, Gumbel
coupling at least (1 - TV) / (1 + TV) (Daliri, Musco and Suresh, "Coupling without Communication", 2024), independent draws
sum(p * q). The product inverts the distribution function, in integer weights. The contexts are answers of the bundled model,
sampled at temperature 0.8; the draft models are the same one with noise in its weights, its first layers, and the model in
the folder that the variable DRAFT_MODEL names (`scripts/train_demo_model.py --draft --out FOLDER`).

A benchmark's time is that of the product's draw of 256 rows. `extra_info` has the shares of right first drafts: measured, and
the exact means over the same contexts.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import vnext
from perf.drafts import ordinary
from vnext import LLM
from vnext.kernels.random import step_words
from vnext.kernels.random_numpy import Domain
from vnext.sampling.sampling import draw_by_inversion
from vnext.sampling.weights import exponents, fixed_point

DEMO = Path(vnext.__file__).parent / "demo_model"
PROMPTS, ROWS, DRAWS, TEMPERATURE = 24, 256, 4, 0.8
DRAFTS = ["noise 0.02", "noise 0.05", "noise 0.1", "noise 0.2", "first 3 layers", "first 2 layers", "trained"]


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    """Token ids of prompts with their answers, int64 [length] each, and where the answers begin."""
    prompts, params = ordinary(PROMPTS, TEMPERATURE)
    with LLM(log="off", threads=1, max_model_len=512) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
    return [(torch.tensor(each.prompt_token_ids + each.outputs[0].token_ids), len(each.prompt_token_ids)) for each in answers]


def weights_of(model: torch.nn.Module, texts: list) -> torch.Tensor:
    """Integer weights int64 [positions, V] of the token behind each position of an answer."""
    found = []
    for tokens, first in texts:
        with torch.inference_mode():
            logits = model(tokens[None]).logits[0, first - 1 : -1].float()
        found.append(fixed_point(exponents(logits, torch.full((len(logits),), TEMPERATURE))))
    return torch.cat(found)


def draft_model(name: str) -> torch.nn.Module:
    if name == "trained":
        if not (folder := os.environ.get("DRAFT_MODEL")):
            pytest.skip("DRAFT_MODEL names no folder with a draft model")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    kind, *rest = name.split()
    if kind == "first":
        model.model.layers = model.model.layers[: int(rest[0])]
        return model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (each for each in model.parameters() if each.dim() == 2):
            weight += float(rest[0]) * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def draw_by_gumbel(weights: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """int64 [S] tokens: the largest log weight with Gumbel noise of a word for each token, from the row's own key."""
    words = step_words(seed, position, torch.arange(weights.shape[1]), Domain.GUMBEL)
    uniform = (words[0].double() + (words[1].double() + 0.5) / 2**32) / 2**32
    return (weights.double().log() - (-uniform.log()).log()).argmax(dim=-1)


def exact(p: torch.Tensor, q: torch.Tensor) -> dict[str, float]:
    """The mean shares of right drafts over rows of probabilities float64 [S, V]."""
    best = torch.minimum(p, q).sum(-1)
    ends = torch.minimum(p.cumsum(-1), q.cumsum(-1))
    starts = torch.maximum(p.cumsum(-1) - p, q.cumsum(-1) - q)
    return {
        "bound": best.mean().item(), "gumbel_at_least": (best / (2 - best)).mean().item(),
        "inversion": (ends - starts).clamp(min=0).sum(-1).mean().item(), "gumbel": gumbel_agreement(p, q).mean().item(),
        "independent": (p * q).sum(-1).mean().item(),
    }  # fmt: skip


def gumbel_agreement(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """float64 [S]: the sum over tokens i of 1 / sum over j of max(p_j / p_i, q_j / q_i), tokens ordered by p / q."""
    ratio = torch.where(q > 0, p / q, torch.inf).where((p > 0) | (q > 0), 0.0)
    order = ratio.argsort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    from_here, before = p.flip(-1).cumsum(-1).flip(-1), q.cumsum(-1) - q
    both = (p > 0) & (q > 0)
    return (1 / (from_here / p + before / q)).where(both, 0.0).sum(-1)


def measured(weights: tuple[torch.Tensor, torch.Tensor], draw) -> tuple[float, float]:
    """The share of rows in which both draw the same token, over DRAWS seeds, and its standard error."""
    rows, right = len(weights[0]), []
    position = torch.arange(rows)
    for seed in range(DRAWS):
        for at in range(0, rows, ROWS):
            here = slice(at, at + ROWS)
            ours, theirs = (draw(each[here], torch.full_like(position[here], seed), position[here]) for each in weights)
            right.append((ours == theirs).double())
    found = torch.cat(right)
    return found.mean().item(), (found.var() / len(found)).sqrt().item()


@pytest.mark.parametrize("name", DRAFTS)
def test_draft(name, texts, benchmark):
    target = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    weights = weights_of(target, texts), weights_of(draft_model(name), texts)
    p, q = (each.double() / each.sum(-1, keepdim=True) for each in weights)
    shares = exact(p, q)
    rows = torch.arange(ROWS)
    benchmark.pedantic(draw_by_inversion, (weights[0][:ROWS], rows, rows), rounds=9, warmup_rounds=1)
    drawn = {"inversion": draw_by_inversion, "gumbel": draw_by_gumbel}
    for how, (share, error) in {how: measured(weights, draw) for how, draw in drawn.items()}.items():
        assert abs(share - shares[how]) < 4.5 * error, (how, share, shares[how])
        benchmark.extra_info |= {f"{how}_measured": round(share, 4), f"{how}_standard_error": round(error, 4)}
    assert shares["gumbel_at_least"] <= shares["gumbel"] <= shares["bound"] >= shares["inversion"]
    benchmark.extra_info |= {"draft": name, "temperature": TEMPERATURE, "contexts": len(p), "draws": DRAWS}
    benchmark.extra_info |= {how: round(share, 4) for how, share in shares.items()}
    greedy = np.mean((p.argmax(-1) == q.argmax(-1)).numpy())
    benchmark.extra_info["greedy"] = round(float(greedy), 4)
