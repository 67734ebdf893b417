"""What differs from layer to layer in one model: how heads turn."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vnext.models.config.rope_config import parse_rope
from vnext.models.layers.rope import inverse_frequencies, rotary_angles


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_pairs_turns_as_if_all_did_and_the_others_stand(share: float) -> None:
    """Within a rounding of transformers' powers, which are float32."""
    named = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share, "factor": 2.0}
    config = Gemma4TextConfig(global_head_dim=32, rope_parameters={"full_attention": named, "sliding_attention": named})
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config, layer_type="full_attention")
    rope = parse_rope({}, named, 32)
    found = inverse_frequencies(rope, 32)
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-6, atol=0.0)
    cosine, sine = rotary_angles(torch.tensor([300]).numpy(), found, rope)
    still = round(16 * (1 - share))
    assert (cosine[0, 16 - still :] == 1).all() and (sine[0, 16 - still :] == 0).all()
