"""Tokenizers from GGUF files give the ids of those that they were made from."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
from gguf_writing import vocabulary_of
from tokenizers import decoders, models, normalizers, trainers

from vnext.models.errors import ModelError
from vnext.models.gguf.tokenizer import CUTS, SPACE, Vocabulary, needed_merges, written
from vnext.runtime.processes.launch import DEMO_MODEL

ALPHABET = "aber Wörter 012345 \n\t=!'s'll日本語🙂\u00a0\u0301{}();_.,ABCxyz  "
LINES = ["def f(x):\n    return x + 1\n", "I'll say it's 12345 words", "", " ", "日本語テキスト 🙂", "a\r\n\r\nb", "\x00\x7f"]


def lines(count: int) -> list[str]:
    """The same ones every time."""
    rng = random.Random(2)
    return LINES + ["".join(rng.choices(ALPHABET, k=rng.randrange(60))) for _ in range(count)]


def made_from(metadata: dict[str, object]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(Vocabulary(metadata).json()))


def assert_same(found: tokenizers.Tokenizer, expected: tokenizers.Tokenizer) -> None:
    for line in lines(2000):
        ids = expected.encode(line, add_special_tokens=False).ids
        assert found.encode(line, add_special_tokens=False).ids == ids, line
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False), line


def test_byte_level() -> None:
    """The demo model's own."""
    spec = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    assert_same(made_from(vocabulary_of(spec, pre="gpt-2")), tokenizers.Tokenizer.from_str(json.dumps(spec)))


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_pieces_with_scores(begins_with_space: bool) -> None:
    """As SentencePiece trains them: the n-th merge has the score -n, and bytes stand in for unknown characters."""
    original = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Prepend(SPACE)] if begins_with_space else []
    original.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    end = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    original.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    original.train_from_iterator([line for line in lines(3000) if "日" not in line], trainer)
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    rank = {"".join(pair): number for number, pair in enumerate(model["merges"])}
    spec = json.loads(original.to_str()) | {"added_tokens": []}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rank.get(token, 10**6)) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.add_space_prefix": begins_with_space,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    found = made_from(metadata)
    assert_same(found, tokenizers.Tokenizer.from_str(json.dumps(spec)))
    assert found.encode("a").ids[0] == 1 and found.encode("a</s>").ids[-1] == 2, "a text begins with bos, and specials are tokens"


def drawn_merges(rng: random.Random) -> list[tuple[str, str]]:
    """All halves of pieces of few letters, the pieces in any order, so that most merges are in another's way."""
    pieces = {"a", "b", "c"}
    for _ in range(60):
        pieces.add("".join(rng.choices("abc", k=rng.randrange(2, 7))))
    order = sorted(pieces)
    rng.shuffle(order)
    halves = [(piece[:cut], piece[cut:]) for piece in order for cut in range(1, len(piece))]
    return [pair for pair in halves if pieces.issuperset(pair)]


def test_merges_that_no_text_needs_are_left_out() -> None:
    """With the others each text has the tokens that it had, and none of the others could be left out too."""
    rng, left_out = random.Random(5), 0
    for _ in range(20):
        merges = drawn_merges(rng)
        numbers = {piece: number for number, piece in enumerate(sorted({"a", "b", "c", *(text for pair in merges for text in (*pair, "".join(pair)))}))}
        needed = needed_merges(merges)
        left_out += len(merges) - len(needed)
        texts = [*numbers, *("".join(rng.choices("abc", k=rng.randrange(1, 30))) for _ in range(300))]
        whole, found = (models.BPE(numbers, each) for each in (merges, needed))
        ids = [[token.id for token in whole.tokenize(text)] for text in texts]
        assert [[token.id for token in found.tokenize(text)] for text in texts] == ids
        made = {pair: [token.value for token in whole.tokenize("".join(pair))] for pair in needed}
        for pair in (pair for pair in needed if len(made[pair]) == 1):
            fewer = models.BPE(numbers, [each for each in needed if each != pair])
            assert len(fewer.tokenize("".join(pair))) > 1
    assert left_out > 200


@pytest.mark.parametrize("comment", ["", "#version"])
def test_merges_are_written_as_the_library_reads_them(comment: str) -> None:
    """A pair with a space makes nothing, as no text has one by then; and what begins as a comment is a merge nevertheless."""
    merges = [("a", "b"), (" ", " "), ("b", " "), ("ab", "\n"), *([(comment, "a")] if comment else [])]
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(["a", "b", " ", "\n", *map("".join, merges), *([comment] if comment else [])]))}
    texts = ["ab", "aab\n", f"{comment}ab", f"{comment}a"]
    found, plain = (
        tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": numbers, "merges": each}}))
        for each in (written(merges), [[*pair] for pair in merges])
    )
    assert [found.encode(text).ids for text in texts] == [plain.encode(text).ids for text in texts]
    assert found.encode("ab\n").tokens == ["ab\n"] and all(isinstance(merge, str) for merge in written(merges[:4]))


@pytest.mark.parametrize("named", [{"tokenizer.ggml.model": "gemma4"}, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "sarvam-moe"}])
def test_pieces_with_merges(named: dict[str, str]) -> None:
    """Spaces become a mark, bytes stand in for unknown characters, and a pair may begin with the space between its halves."""
    tokens = ["<pad>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", "ab", f"{SPACE}ab", "\n", "\n\n", " ", "  "]
    metadata = named | {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, *[6] * 256, *[1] * 9],
        "tokenizer.ggml.merges": ["a b", f"{SPACE} ab", "\n \n", "   "], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": named["tokenizer.ggml.model"] != "gemma4",
    }  # fmt: skip
    found = made_from(metadata)
    assert found.encode(" ab\n\nc").tokens == ["<bos>", f"{SPACE}ab", "\n\n", "<0x63>"]
    assert found.decode(found.encode(" ab b").ids) == " ab b"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("qwen35", "HelloWorld's 12 e\u0301x", ["HelloWorld", "'s", " ", "1", "2", " e\u0301x"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("minicpm5", "a1234", ["a", "123", "4"]),
        ("exaone-moe", "one two!\n\nx", ["one two", "!\n", "\n", "x"]),
        ("bailingmoe", "a,\n\nb 12", ["a", ",\n\n", "b", " ", "1", "2"]),
        ("afmoe", "a1234567中x", ["a", "1", "234", "567", "中", "x"]),
        ("tiny_aya", "1234 12a", ["1", "234", " ", "12", "a"]),
        ("superbpe", "one two 12345", ["one two ", "12", "345"]),
        ("kimi-k2", "ab中文Cd 123/\n", ["ab", "中文", "Cd", " ", "123", "/\n"]),
        ("youtu", "ab中，가x", ["ab", "中", "，", "가", "x"]),
        ("spark2_5", "a,\n\n12", ["a", ",", "\n", "\n", "1", "2"]),
        ("laguna", "a\n\n b", ["a", "\n\n", " b"]),
        ("ufakzeka", "a'ya 12", ["a", "'ya", " ", "1", "2"]),
        ("deepseek-llm", "a b,12 中x", ["a", " b", ",", "12", " ", "中", "x"]),
        ("chameleon", "a  bIMGIMGABZ.", ["a", "  ", "b", "IMGIMGABZ", "."]),
        ("default", "a b, 12345", ["a", " b", ",", " ", "123", "45"]),
        ("smollm", "I'll 123 go", ["I", "'ll", " ", "1", "2", "3", " go"]),
        ("qwen2", "I'LL 123 go\n\n", ["I", "'LL", " ", "1", "2", "3", " go", "\n\n"]),
        ("llama-bpe", "I'LL 12345  go", ["I", "'LL", " ", "123", "45", " ", " go"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("gpt-2", "don't 123", ["don", "'t", " 123"]),
        ("exaone4", "don't 123", ["don", "'t", " 123"]),
        ("deepseek-v3", "ab中文12345.foo e\u0301,\n x", ["ab", "中文", "123", "45", ".foo", " e\u0301", ",\n", " x"]),
        ("deepseek-coder", "a b,12\n中x", ["a", " b", ",", "1", "2", "\n", "中", "x"]),
        ("seed-coder", "I'LL 12!\n", ["I", "'LL", " ", "1", "2", "!", "\n"]),
        ("stablelm2", "I'LL 12!\n", ["I", "'LL", " ", "1", "2", "!\n"]),
        ("falcon", "a+1234 b", ["a", "+", "123", "4", " b"]),
        ("bloom", "a b, 12", ["a", " b", ",", " 12"]),
        ("viking", "a b, 12", ["a", " b", ",", " ", "1", "2"]),
    ],
)
def test_how_texts_are_cut(name: str, text: str, words: list[str]) -> None:
    spec = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": CUTS[name].steps()}
    cut = tokenizers.Tokenizer.from_str(json.dumps(spec)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cut] == words


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer.ggml.pre": "lama-bpe"}, "'lama-bpe' is not known, did you mean llama-bpe: take"),
        ({"tokenizer.ggml.model": "rwkv"}, "of the kind 'rwkv'; kinds gpt2, llama, gemma4 are read"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "names a token twice"),
        ({"tokenizer.ggml.model": "llama"}, "no score for each token"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b" * 1025], "tokenizer.ggml.scores": (0, -1)},
            "a token of 1025 characters",
        ),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        Vocabulary({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]} | changes).json()


def test_templates_and_ends() -> None:
    words = {
        "tokenizer.ggml.tokens": ["a", "</s>", "<eot>"], "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two", "tokenizer.ggml.padding_token_id": 9,
    }  # fmt: skip
    vocabulary = Vocabulary(words)
    assert vocabulary.ends() == [1, 2]
    assert vocabulary.settings() == {
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}],
    }
