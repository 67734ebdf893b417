"""SmolLM2 as people meet it: real weights in 4 bits behind `vnext serve smollm2`, and the same file in transformers.

Skipped where the model was not fetched (`vnext pull smollm2`, which scripts/test.sh does once). Tokens, template and the text of the
float path are those of transformers 5; drafts print how many of them were accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from engine_here import engines_here

from perf.gguf_tokenizers import drawn, special_texts
from vnext import LLM, SamplingParams
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.models.gguf.header import read_header
from vnext.models.gguf.tokenizer import Vocabulary
from vnext.models.loading.named import MODELS

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "e2e"))

from serving import Server, eventually, serving  # noqa: E402  (needs the path above)

SHELF = Path(os.environ.get("VNEXT_MODELS_DIR") or "~/.local/share/vnext/models").expanduser()
FILE = SHELF / "smollm2" / Path(MODELS["smollm2"].wanted.member).name
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason=f"SmolLM2 is not in {SHELF}: `vnext pull smollm2` fetches 93 MB")

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
SUFFIX = '{"method": "suffix", "num_speculative_tokens": 8}'
QUESTIONS = (
    "What is the capital of Germany?", "Give me three tips for learning Python.", "Translate to French: The cat sleeps on the mat.",
    "Write a function in Python that adds two numbers.",
)  # fmt: skip
PROGRAM = "def area(width, height):\n    return width * height\n\n\ndef edge(width, height):\n    return 2 * (width + height)\n"
EDITS = (f"Repeat this program word by word:\n{PROGRAM}", "Write the numbers from one to thirty, one in each line.")
GREEDY = SamplingParams(temperature=0, max_tokens=48)
TOKENS = {
    "def f(x):\n    return x + 1  # naïve\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 1232, 216, 33, 216, 907, 15486, 46494, 198],
    "1234567 dollars, 3.14": [33, 34, 35, 36, 37, 38, 39, 8358, 28, 216, 35, 30, 33, 36],
    "你好，世界 👩‍👩‍👧": [
        18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 15107, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117,
    ],
    "I'll  we've\tTAB\r\n\n  end ": [57, 3060, 216, 392, 3543, 197, 68, 5431, 201, 8866, 1112, 216],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
}  # fmt: skip
DRAWN, DRAWN_SHA256 = 1000, "066d28c8af2bf2d4489d2c311c36c33a8143684cdb5003d0924d647087ab56bc"
"""Lines of perf/gguf_tokenizers.py, and the hash of their ids as llama.cpp gave them too."""
PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip
"""A tensor's name in the file and in transformers."""
RENDERED = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    },
}  # fmt: skip
COUNTRY = {
    "type": "object",
    "properties": {"capital": {"type": "string"}, "continent": {"enum": ["Asia", "Europe", "Africa"]}},
    "required": ["capital", "continent"], "additionalProperties": False,
}  # fmt: skip


def test_tokens_are_those_of_llama_cpp() -> None:
    vocabulary = Vocabulary(read_header(FILE).metadata)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.json()))
    lines = list(drawn(DRAWN, special_texts(vocabulary)))
    ids = [each.ids for each in tokenizer.encode_batch(lines, add_special_tokens=False)]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == DRAWN_SHA256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("logs")
    with serving(folder, "smollm2", "--models-dir", str(SHELF), "--threads", "1", "--speculative-config", NGRAM) as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The tokens of answers without drafts."""
    return answers(GREEDY, *EDITS)


def answers(params: SamplingParams, *questions: str, **settings: object) -> list[list[int]]:
    with engines_here(), LLM("smollm2", models_dir=str(SHELF), executor="inproc", threads=1, log="off", **settings) as llm:
        talks = [[{"role": "user", "content": each}] for each in questions]
        return [each.outputs[0].token_ids for each in llm.chat(talks, params, use_tqdm=False)]


def asked(server: Server, content: str, **body: object) -> dict:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 60} | body
    return BlockingClient(server.url).ask("/v1/chat/completions", body, dict)["choices"][0]["message"]


def test_the_readmes_question_has_its_answer(server: Server) -> None:
    shown = re.search(r"-d '(\{.*\})'\n +(.*?\n.*?)\n\n", (ROOT / "README.md").read_text())
    body = json.loads(shown[1])
    answer = asked(server, body.pop("messages")[0]["content"], **body)["content"]
    assert answer == "The capital of Germany is Berlin." and answer in " ".join(shown[2].split())


def test_tokens_and_template_are_those_of_transformers(server: Server) -> None:
    client = BlockingClient(server.url)
    for text, ids in TOKENS.items():
        assert client.ask("/tokenize", {"prompt": text, "add_special_tokens": False}, dict)["tokens"] == ids
    ids = client.ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}, dict)["tokens"]
    assert client.ask("/detokenize", {"tokens": ids}, dict)["prompt"] == RENDERED


def test_it_calls_a_tool(server: Server) -> None:
    message = asked(server, "What is the weather in Paris?", tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather" and "Paris" in json.loads(call["function"]["arguments"])["city"]


def test_it_keeps_to_a_schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "country", "schema": COUNTRY, "strict": True}}
    found = json.loads(asked(server, "What are the capital and the continent of Germany? Answer as JSON.", response_format=form)["content"])
    jsonschema.validate(found, COUNTRY)
    assert found == {"capital": "Berlin", "continent": "Europe"}


def test_drafts_give_the_same_text(server: Server, plain: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    """`ngram` over HTTP, `suffix` in a program; the former says how many of its drafts were accepted."""
    client = BlockingClient(server.url)
    names = [f"vnext_spec_decode_num_{kind}_tokens_total" for kind in ("accepted", "draft")]
    before = [server.metric(name) for name in names]
    for question, ids in zip(EDITS, plain):
        text = asked(server, question, max_tokens=GREEDY.max_tokens)["content"]
        assert text == client.ask("/detokenize", {"tokens": ids}, dict)["prompt"].removesuffix("<|im_end|>")
    assert eventually(lambda: server.metric("vnext_num_requests_running") == 0)
    accepted, drafted = (server.metric(name) - at for name, at in zip(names, before))
    with capsys.disabled():
        print(f"\nSmolLM2, ngram: {accepted:.0f} of {drafted:.0f} draft tokens accepted")
    assert drafted >= accepted > 0
    assert answers(GREEDY, *EDITS, speculative_config=SUFFIX) == plain


def test_in_floats_its_text_is_that_of_transformers() -> None:
    """In float32 every token is the likeliest behind those before it, by transformers on the dequantised weights."""
    model = of_transformers()
    params = SamplingParams(temperature=0, max_tokens=40)
    floats = {"dtype": "float32", "quantization": "none"}
    with engines_here(), LLM("smollm2", models_dir=str(SHELF), executor="inproc", threads=1, log="off", **floats) as llm:
        found = llm.chat([[{"role": "user", "content": each}] for each in QUESTIONS], params, use_tqdm=False)
    assert found[0].outputs[0].text == "The capital of Germany is Berlin."
    for each in found:
        prompt, answer = list(each.prompt_token_ids), list(each.outputs[0].token_ids)
        with torch.no_grad():
            likeliest = model(torch.tensor([prompt + answer])).logits[0].argmax(-1).tolist()
        assert likeliest[len(prompt) - 1 : -1] == answer


def of_transformers() -> torch.nn.Module:
    """transformers' model with the numbers of the file, dequantised by the package gguf."""
    transformers = pytest.importorskip("transformers")
    header = read_header(FILE)
    told = {name.removeprefix("llama."): value for name, value in header.metadata.items()}
    config = transformers.LlamaConfig(
        num_hidden_layers=told["block_count"], hidden_size=told["embedding_length"], intermediate_size=told["feed_forward_length"],
        num_attention_heads=(heads := told["attention.head_count"]), num_key_value_heads=(shared := told["attention.head_count_kv"]),
        vocab_size=told["vocab_size"], max_position_embeddings=told["context_length"], tie_word_embeddings=True,
        rms_norm_eps=told["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": told["rope.freq_base"]},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    found, data = {}, FILE.read_bytes()
    for name, each in header.tensors.items():
        type_ = gguf.GGMLQuantizationType[each.type]
        value = gguf.quants.dequantize(np.frombuffer(data[each.start : each.stop], np.uint8), type_).reshape(each.shape)
        *layer, part, _ = name.split(".")
        if count := {"attn_q": heads, "attn_k": shared}.get(part):  # a head's channels stand in pairs there
            value = value.reshape(count, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        inside = f"model.layers.{layer[1]}." if layer else ""
        found[f"{inside}{PARTS[part]}.weight"] = torch.from_numpy(np.array(value, np.float32))
    model.load_state_dict(found | {"lm_head.weight": found["model.embed_tokens.weight"]}, assign=True)
    return model
