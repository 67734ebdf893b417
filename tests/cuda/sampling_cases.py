"""Random rows of logits and sampling parameters: the extremes of each, equals, holes, infinities and NaN."""

from __future__ import annotations

import torch

from vnext.kernels.cuda import sampling
from vnext.runtime.sampling_inputs import SamplingInputs

THREADS = 128
INFINITY, NAN = float("inf"), float("nan")
TEMPERATURES = (0.0, 1e-40, 1e-5, 0.1, 0.7, 1.0, 1.0, 1.5, 5.0, 1e30)
TOP_K = (0, 0, 0, 1, 2, 50, 200, 3000, 10**9)
TOP_P = (1.0, 1.0, 0.0, 1e-9, 0.5, 0.9, 0.99, 0.999999)
MIN_P = (0.0, 0.0, 0.0, 1.0, 0.05, 1e-6, 1e-11, 1e-20)


class Draws:
    """Seeded random rows and parameters."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, values: tuple[float, ...], count: int) -> torch.Tensor:
        return torch.tensor(values)[self.integers(0, len(values), count)]

    def integers(self, low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=self.generator)

    def inputs(self, rows: int) -> SamplingInputs:
        return SamplingInputs(
            temperature=self.pick(TEMPERATURES, rows),
            top_k=self.pick(TOP_K, rows),
            top_p=self.pick(TOP_P, rows),
            min_p=self.pick(MIN_P, rows),
            seed=self.integers(-(2**63), 2**63 - 1, rows),
            position=self.integers(0, 2**32, rows),
        )

    def logits(self, rows: int, vocabulary: int) -> torch.Tensor:
        """Narrow and wide rows, some with equals, holes, infinities and NaN."""
        spread = self.pick((0.0, 0.01, 0.5, 1.0, 3.0, 10.0, 100.0), rows)[:, None]
        logits = torch.randn(rows, vocabulary, generator=self.generator) * spread + self.pick((0.0, 5.0, -3e3), 1)
        logits[::3] = logits[::3].round()
        logits[1::4][torch.rand(logits[1::4].shape, generator=self.generator) < 0.7] = -INFINITY
        for row in range(0, rows, 5):
            logits[row, int(self.integers(0, vocabulary, 1))] = float(self.pick((NAN, INFINITY, -INFINITY, 0.0, -0.0), 1))
        logits[-1] = float(self.pick((NAN, INFINITY, -INFINITY, 0.0), 1))
        return logits


def sampled(logits: torch.Tensor, inputs: SamplingInputs, threads: int = THREADS) -> torch.Tensor:
    columns = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.position)
    return sampling.sample_rows(logits, *columns, threads=threads)
