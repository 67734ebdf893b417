"""What pictures cost the streams beside them: `python -m perf.picture_gaps [--theirs] [--input-tokens 16] --json RECORD`.

Four requests decode while five others bring ten tiles of 512 x 512 pixels, and while nobody comes. The figures are the gaps between
two tokens of the four, and the times until the others have their first token. The model has the shape of SmolVLM-256M and random weights in bfloat16;
with `--theirs` it is InternVL, whose tower transformers computes, with as many layers, patches and vectors.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perf.record import machine, parser_of, record_of, write_record
from scripts.random_model import filled_tokenizer
from vnext import LLM
from vnext.media.seen import Part
from vnext.media.store import MediaStore, digest_of, folder_of
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import pack_tokens
from vnext.state.params import Sampling
from vnext.state.store.inputs import Input, with_inputs

SIDE, TILE_TOKENS, IMAGE = 512, 64, 49190
TILES, STREAMS, ANSWER = 10, 4, 160
SHARES = {"median": 50, "p95": 95, "p99": 99, "max": 100}
CONFIG = {
    "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "image_token_id": IMAGE, "scale_factor": 4,
    "dtype": "bfloat16", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama", "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100000, "hidden_act": "silu", "pad_token_id": 2, "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": SIDE, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
}  # fmt: skip


def write_shape(folder: Path) -> Path:
    """What an engine needs of a model whose weights it draws."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(filled_tokenizer(3200)))
    sizes = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


def write_theirs(folder: Path) -> Path:
    """A model with the same sizes whose tower transformers computes, which asks for numbers in files."""
    import torch
    import transformers

    (folder / "tokenizer.json").write_text(json.dumps(filled_tokenizer(3200)))
    words = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>", "video_token": "<video>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=words)
    tokenizer.save_pretrained(folder)
    seen = CONFIG["vision_config"] | {"model_type": "internvl_vision", "image_size": [SIDE] * 2, "patch_size": [16] * 2}
    config = transformers.InternVLConfig(
        text_config=CONFIG["text_config"], vision_config=seen, downsample_ratio=0.25,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.InternVLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    transformers.GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, crop_to_patches=False).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": TILE_TOKENS}))
    return folder


def request(name: str, prompt: np.ndarray, count: int) -> SubmitRequest:
    sampling = Sampling(seed=0, max_tokens=count, temperature=0.0, ignore_eos=True)
    return SubmitRequest(name=name, prompt=pack_tokens(prompt), sampling=sampling, has_seed=True)


def pictured(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """A prompt of these tiles, each with a token before it."""
    inputs = [Input(1 + at * (TILE_TOKENS + 1), TILE_TOKENS, digest_of(Part(tile).file)) for at, tile in enumerate(tiles)]
    return with_inputs(np.full(len(tiles) * (TILE_TOKENS + 1) + 2, 7, np.int32), inputs)


def first_tokens_ms(llm: LLM, requests: Sequence[SubmitRequest], found: list[float]) -> None:
    """Add to `found` how long each has waited."""
    began_s, seen = time.perf_counter(), set[str]()
    for output in llm._client.run(requests):
        if output.name not in seen:
            found.append(1e3 * (time.perf_counter() - began_s))
        seen.add(output.name)


def gaps_ms(llm: LLM, others: Sequence[SubmitRequest], number: int, waited: list[float]) -> list[float]:
    """Of the streams, into which the others come when each has had a token; `number` tells prompts of rounds apart."""
    streams = [request(f"stream {at}", np.full(20, 9 + number * STREAMS + at, np.int32), ANSWER) for at in range(STREAMS)]
    last, gaps, coming = dict[str, float](), list[float](), threading.Thread(target=first_tokens_ms, args=(llm, others, waited))
    for output in llm._client.run(streams):
        now_s = time.perf_counter()
        if output.name in last:
            gaps.append(1e3 * (now_s - last[output.name]))
        last[output.name] = now_s
        if len(last) == STREAMS and not coming.ident and others:
            coming.start()
    if coming.ident:
        coming.join()
    return gaps


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-tokens", type=int, help="as of the engine")
    parser.add_argument("--theirs", action="store_true", help="with a tower that transformers computes")
    options, before, found = parser.parse_args(), machine(), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"threads": options.threads, "input_tokens": options.input_tokens}
        write, kind = (write_theirs, "auto") if options.theirs else (write_shape, "dummy")
        with LLM(str(write(Path(folder))), load_format=kind, log="off", **settings) as llm:
            store, rng = MediaStore([folder_of(llm._address)]), np.random.default_rng(0)
            for number in range(options.rounds):
                tiles = rng.integers(0, 256, (TILES, SIDE, SIDE, 3), dtype=np.uint8)
                store.put([Part(tile).file for tile in tiles], "the image")
                pairs = [request(f"pair {at}", pictured(tiles[at : at + 2]), 4) for at in range(0, TILES, 2)]
                found.setdefault("alone", []).extend(gaps_ms(llm, [], 2 * number, []))
                waited = found.setdefault("first tokens of pictures", [])
                found.setdefault("beside pictures", []).extend(gaps_ms(llm, pairs, 2 * number + 1, waited))
    figures = {name: {key: round(float(np.percentile(gaps, share)), 2) for key, share in SHARES.items()} for name, gaps in found.items()}
    print(json.dumps(figures, indent=1))
    command = f"python -m perf.picture_gaps --threads {options.threads} --rounds {options.rounds}"
    command += " --theirs" * options.theirs
    command += "" if options.input_tokens is None else f" --input-tokens {options.input_tokens}"
    if options.json:
        write_record(options.json, record_of(command + " --json RECORD", before, {"gaps_ms": figures, "tiles": TILES, "streams": STREAMS}))


if __name__ == "__main__":
    main()
