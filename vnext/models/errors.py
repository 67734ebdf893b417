"""The only error of this folder: a model that cannot be used, in one sentence with the value and the remedy."""

from __future__ import annotations


class ModelError(Exception):
    """The model's folder, configuration or weights cannot be served as asked."""
