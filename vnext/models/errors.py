"""The errors of this folder: a model that cannot be used, in one sentence with the value and the remedy; an input that is gone."""

from __future__ import annotations


class ModelError(Exception):
    """The model's folder, configuration or weights cannot be served as asked."""


class InputGone(ModelError):
    """The file of an input, known by its `digest`, is not there, or not as it was written: who shows it cannot be answered."""

    def __init__(self, sentence: str, digest: bytes) -> None:
        super().__init__(sentence)
        self.digest = digest
