"""Words that ranks, engine core and servers share: why the engine ends a request by itself, and what it says of its model."""

from __future__ import annotations

from vnext.models.config.pooling import WRITTEN

NOT_A_NUMBER = "the model computes what is no number (NaN): its weights or an adapter's are damaged, or its --dtype is too narrow"
NO_HEAD = "none"  # of the environment's member "head": the checkpoint has none, and the model makes embeddings only
IMAGES = "images"
"""Member of the environment of a model that reads images, or sounds among its tokens: their form, the token of one, and numbers
of the form."""
SOUNDS = "sounds"
"""Member of the environment of a model whose prompts begin with a sound: how many tokens stand for it, and the most of its
samples."""
ENCODES = "encodes"
"""Member of the environment of an engine that encodes images and sounds for others, and writes nothing."""
NORMALIZED = " normalized"
"""Ends the environment's member "pooling" where files say that the vectors of texts have the length 1."""
SCORES, WRITTEN_PAIRS = "scores", WRITTEN
"""Member of the environment of a model that scores pairs of texts, and its value where the chat template writes them."""
