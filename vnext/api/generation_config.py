"""A checkpoint's generation_config.json: the sampling defaults of requests that leave a parameter unset.

Owns the list of fields that count (those that vLLM reads) and their names here; the other fields are ignored. The API server
and the library resolve the defaults: the engine core and the log see resolved parameters only. The end tokens in the same
file belong to the model's configuration (vnext/models/config/model_config.py).
"""

from __future__ import annotations

from pathlib import Path

from vnext.models.config.json_keys import read_optional_json, token_ids
from vnext.models.errors import ModelError
from vnext.runtime.processes.launch import StartRefused
from vnext.runtime.protocol.sampling_params import IN_CHECKPOINT, InvalidRequest, SamplingDefaults, SamplingParams

FILE_NAME = "generation_config.json"
FIELDS = {name: name for name in IN_CHECKPOINT} | {"max_new_tokens": "max_tokens"}
TOKENS = {
    "suppress_tokens": "suppressed", "begin_suppress_tokens": "suppressed_first", "max_initial_timestamp_index": "latest_first",
}  # fmt: skip
"""The file's names and those of SamplingParams, and of SamplingDefaults where they are lists of tokens, or of one number."""


def sampling_defaults(folder: Path, is_read: bool = True) -> SamplingDefaults:
    """The defaults in the file in `folder`; empty where there is no file or it is not to be read. Raises StartRefused."""
    if not is_read:
        return SamplingDefaults()
    try:
        found = read_optional_json(folder / FILE_NAME)
        given = {name: found[theirs] for theirs, name in FIELDS.items() if found.get(theirs) is not None}
        SamplingParams(**given)
        given |= {name: token_ids(found, theirs, FILE_NAME) for theirs, name in TOKENS.items() if found.get(theirs) is not None}
    except ModelError as error:
        raise StartRefused(f"{error}, or leave it alone with --generation-config none") from error
    except InvalidRequest as error:
        message = error.message.rstrip(".")
        raise StartRefused(
            f"{folder / FILE_NAME}: {message}; correct it, or leave it alone with --generation-config none"
        ) from error
    return SamplingDefaults(**given)
