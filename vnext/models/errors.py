"""The one error of this room: a model that cannot be used, said in a sentence with the value and the remedy."""

from __future__ import annotations


class ModelError(Exception):
    """The model's folder, configuration or weights cannot be served as asked."""
