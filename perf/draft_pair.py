"""A random model and a draft model that is right a known share of the time, for measurements of speed.

    python -m perf.draft_pair FOLDER [--shape llama-135m] [--layers 2] [--rest 0.03]

FOLDER/model has the shape's sizes and costs what any model of that shape costs. What its layers behind the first few add to the
residual stream is scaled by `--rest`, and its last norm makes the distributions about as sharp as those of text. FOLDER/draft is
made of its first layers, embedding and norm. So the draft model guesses what the rest adds, and the smaller that is the more
often it is right; perf/drafts.py measures how often.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from random_model import SHAPES, write_checkpoint  # noqa: E402

SHARPNESS = 10.0
"""The weight of the last norm: random logits have a standard deviation of half, and real ones of several units."""
WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""The weights whose products are added to the residual stream."""


def write_pair(folder: Path, shape: str = "llama-135m", layers: int = 2, rest: float = 0.03) -> tuple[Path, Path]:
    """The folders of the model and of its draft model, which has `layers` layers."""
    model, draft = folder / "model", folder / "draft"
    write_checkpoint(SHAPES[shape], model)
    tensors = load_file(str(model / "model.safetensors"))
    for name, weight in tensors.items():
        if layer_of(name) >= layers and name.endswith(WRITES):
            weight *= rest
    tensors["model.norm.weight"] *= SHARPNESS
    save_file(tensors, str(model / "model.safetensors"), metadata={"format": "pt"})
    draft.mkdir(exist_ok=True)
    for path in model.glob("*.json"):
        (draft / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}) + "\n")
    kept = {name: weight for name, weight in tensors.items() if layer_of(name) < layers}
    save_file(kept, str(draft / "model.safetensors"), metadata={"format": "pt"})
    return model, draft


def layer_of(name: str) -> int:
    """The layer of a tensor, -1 outside of the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--shape", choices=sorted(SHAPES), default="llama-135m")
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--rest", type=float, default=0.03)
    chosen = options.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    print(*write_pair(chosen.folder, chosen.shape, chosen.layers, chosen.rest))


if __name__ == "__main__":
    main()
