"""A checkpoint's generation_config.json as defaults of requests that do not say otherwise.

Owns which of its fields count (those that vLLM takes) and their names here; the rest is ignored. What requests are
sampled with is decided at the edge: the engine core, and the log, see resolved parameters only. The same file's ending
tokens belong to the model's configuration (vnext/models/config.py).
"""

from __future__ import annotations

from pathlib import Path

from vnext.models.errors import ModelError
from vnext.models.json_keys import read_optional_json
from vnext.runtime.launch import StartRefused
from vnext.runtime.settings import GenerationConfig
from vnext.sampling_params import InvalidRequest, SamplingDefaults, SamplingParams, validate

FILE_NAME = "generation_config.json"
FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The file's names and those of SamplingParams."""


def sampling_defaults(folder: Path, choice: GenerationConfig) -> SamplingDefaults:
    """What the file in `folder` says; nothing where there is none or `choice` is "none". Raises StartRefused."""
    if choice == "none":
        return SamplingDefaults()
    try:
        said = read_optional_json(folder / FILE_NAME)
        given = {name: said[theirs] for theirs, name in FIELDS.items() if said.get(theirs) is not None}
        validate(SamplingParams(**given), vocab_size=0)
    except ModelError as error:
        raise StartRefused(f"{error}, or leave it alone with --generation-config none") from error
    except InvalidRequest as error:
        said = error.message.rstrip(".")
        raise StartRefused(
            f"{folder / FILE_NAME}: {said}; correct it, or leave it alone with --generation-config none"
        ) from error
    return SamplingDefaults(**given)
