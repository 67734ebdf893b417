"""CWM as a family from outside, in place of ours: Llama's form with windows. `vnext serve FOLDER --family examples/family.py`."""

from __future__ import annotations

from vnext.models.config.json_keys import Json, positive
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES

__all__ = ["ARCHITECTURES", "WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

ARCHITECTURES = ("CwmForCausalLM",)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration: every fourth layer sees all tokens, the others those in their window."""
    kinds = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(positive(raw, "num_hidden_layers"))]
    return common_config(raw, generation, windows=layer_windows(raw, kinds))


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, by their names in the checkpoint."""
    return assemble_decoder(source, config, lambda prefix, layer: (attention(source, prefix), gated_mlp(source, prefix)))
