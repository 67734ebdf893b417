"""Why the engine ends a request by itself, in words that ranks, engine core and servers share."""

from __future__ import annotations

NOT_A_NUMBER = "the model computes what is no number (NaN): its weights or an adapter's are damaged, or its --dtype is too narrow"
