"""Logits to tokens: adjust logits, turn them into integer weights, draw. The plain form, on any device.

Arrays only: no requests and no state. `runtime/batch` and `runtime/gpu` give the rows of a batch their parameters.
Has met x86-64 Linux (AMD EPYC): `pytest tests/sampling`. Has not met a GPU: `scripts/gpu_check.sh`.
"""
