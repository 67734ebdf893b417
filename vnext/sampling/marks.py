"""The mark in a row's token counts. Without torch, so that the engine core can compute what a batch must hold."""

from __future__ import annotations

IN_PROMPT = 2**30
"""Added to the count of a penalised request's token if the token is in the prompt."""
