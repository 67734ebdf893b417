"""Samplers from outside: functions of installed packages that choose tokens in place of vnext's draw.

Owns what they are given and what is checked of them before an engine serves: a token depends on its own row alone. They run as the
user's own code: neither a request nor a log can bring one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch

from vnext.base.installed import InstalledError, first_line, load_entry
from vnext.kernels.random import step_words
from vnext.kernels.random_numpy import Domain
from vnext.sampling.inputs import SamplingInputs
from vnext.state.params import CHOOSING

GROUP = "vnext.samplers"
"""The entry points of packages: a sampler's name is the entry point's, the function its value."""
TRIED_ROWS = 6


class SamplerError(ValueError):
    """A sampler that cannot be used. The message is one sentence with its name and the remedy."""


class Rows(NamedTuple):
    """What a sampler knows of S rows beside their logits: [S] each, with the meaning and the dtypes of vnext.state.params.Drawn.

    Temperatures of 0 are of rows whose token is the likeliest one, whatever the sampler says.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_n_sigma: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    def words(self, count: int) -> torch.Tensor:
        """int64 [S, count] random words of 32 bits by the rows' seeds and positions; the first ones are the same for any count."""
        counters = torch.arange(-(-count // 2), device=self.seed.device)
        pairs = step_words(self.seed, self.position, counters, Domain.OUTSIDE)
        return torch.stack(pairs, dim=2).flatten(1)[:, :count]


Function = Callable[[torch.Tensor, Rows], torch.Tensor]
"""From logits float32 [S, V], which it may not change, and rows to tokens int64 [S]."""


class OwnSampler(NamedTuple):
    """As sampling.Choose, by a function from outside. Where it gives no token that may come, the likeliest one does."""

    name: str
    function: Function

    def __call__(self, logits: torch.Tensor, inputs: SamplingInputs, *, spoilt: torch.Tensor | None = None) -> torch.Tensor:
        likeliest = logits.argmax(dim=-1)
        peak = logits.gather(1, likeliest[:, None])[:, 0]
        if spoilt is not None:
            spoilt.copy_(peak.isnan())
        if not inputs.any_random:
            return likeliest
        drawn = self.function(logits, rows_of(inputs))
        chosen = logits.gather(1, drawn.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        is_token = (drawn >= 0) & (drawn < logits.shape[1]) & (chosen > float("-inf"))
        return torch.where(is_token & (inputs.temperature > 0) & ~peak.isnan(), drawn, likeliest)


def rows_of(inputs: SamplingInputs) -> Rows:
    """What a sampler is given of the inputs' rows."""
    columns = dict(zip((*CHOOSING, "seed", "position"), inputs.columns(), strict=True))
    return Rows(*(columns[name] for name in Rows._fields))


def own_sampler(name: str, vocab_size: int) -> OwnSampler:
    """The sampler that an installed package has under this name, after its trial. Raises SamplerError."""
    try:
        found = OwnSampler(name, cast(Function, load_entry(GROUP, name, "sampler")))
    except InstalledError as error:
        raise SamplerError(str(error)) from error
    require_pure(found, vocab_size)
    return found


def require_pure(sampler: OwnSampler, vocab_size: int) -> None:
    """Raise SamplerError unless rows get the same tokens again, alone, beside more and in another order; logits must stay."""
    logits, rows = trial(vocab_size)
    kept, every = logits.clone(), torch.arange(TRIED_ROWS)
    whole = _tokens(sampler, logits, rows)
    if not torch.equal(logits, kept):
        raise SamplerError(f"the sampler {sampler.name} changes the logits that it is given: let it change a copy")
    if bool((whole < 0).any() | (whole >= vocab_size).any()) or not bool((logits.gather(1, whole[:, None]) > float("-inf")).all()):
        raise SamplerError(f"the sampler {sampler.name} chooses what may not come: no token whose logit is minus infinity")
    for what, places in _orders(every):
        if not torch.equal(_tokens(sampler, logits[places], Rows(*(column[places] for column in rows))), whole[places]):
            why = "a row's token may depend on its own logits, parameters and words alone"
            raise SamplerError(f"the sampler {sampler.name} chooses other tokens for the same rows {what}: {why}")


def trial(vocab_size: int) -> tuple[torch.Tensor, Rows]:
    """Rows of random logits, each with parameters of its own; in some few tokens may come."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TRIED_ROWS, vocab_size, generator=generator) * 3
    logits[1::3, 1::2] = float("-inf")
    scale = torch.linspace(0.5, 1.0, TRIED_ROWS)
    numbers = torch.arange(TRIED_ROWS)
    return logits, Rows(scale, numbers * 7, scale, scale / 8, 1 - scale, numbers * 2**40 + 5, numbers + 3)


def _orders(every: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "again", every
    yield "in another order", every.flip(0)
    yield "beside more of them", torch.cat((every, every))
    yield from (("alone", every[place : place + 1]) for place in range(len(every)))


def _tokens(sampler: OwnSampler, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    try:
        found = sampler.function(logits, rows)
    except Exception as error:  # a package's code may raise anything
        raise SamplerError(f"the sampler {sampler.name} fails with {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(found, torch.Tensor) or found.dtype != torch.int64 or found.shape != logits.shape[:1]:
        what = f"{found.dtype}{list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise SamplerError(f"the sampler {sampler.name} returns {what}: it must return torch.int64[{len(logits)}], a token a row")
    return found
