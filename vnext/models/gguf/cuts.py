"""Pre-tokenizers: how the byte-level vocabularies that GGUF files name cut a text into words, in the terms of a tokenizer.json.

A name stands for the regular expressions of llama.cpp's src/llama-vocab.cpp: for those of the models' authors where it names them,
since its own engine cannot read all of these.
"""

from __future__ import annotations

from typing import NamedTuple

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LINE_REST = r"\s*[\r\n]|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
MARK = r"[^\r\n\p{L}\p{N}]?"
LINES = r"[^\n]+|[\n]+"
FALLS = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"
"""Of white space in steps, as JAIS 2 has it."""


CASES = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ"
    "-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ"
    "-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲ"
    "ⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with a case, as DeepSeek LLM lists them."""


def _words(digits: str, endings: str = f"{ENDINGS}|", rest: str = REST) -> str:
    return rf"{endings}{MARK}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{rest}"


def _cased(ending: str, digits: str) -> str:
    return (
        rf"{MARK}{UPPER}*{LOWER}+{ending}|{MARK}{UPPER}+{LOWER}*{ending}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
    )


class Cut(NamedTuple):
    """Each of `patterns` cuts what those before it have left, at both ends of its matches; then GPT-2's, if `as_gpt2`.
    `takes_whole_words`: a word that the vocabulary has is not put together by merges. `composes`: characters are composed first
    (NFC)."""

    patterns: tuple[str, ...] = ()
    as_gpt2: bool = False
    takes_whole_words: bool = False
    composes: bool = False

    def steps(self) -> dict[str, object]:
        """The pre_tokenizer of a tokenizer.json."""
        cuts = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in self.patterns]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": self.as_gpt2}
        return {"type": "Sequence", "pretokenizers": [*cuts, level]}


THREES, ONES, CASED = _words(r"\p{N}{1,3}"), _words(r"\p{N}"), _cased(f"{ENDINGS}?", r"\p{N}{1,3}")
SIGNS = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
CHINESE = r"\p{N}{1,3}", HAN, SIGNS + r"[\r\n]*|" + REST
NO_HAN = (f"{UPPER[:-1]}&&[^\\p{{Han}}]]", f"{LOWER[:-1]}&&[^\\p{{Han}}]]")
KIMI = r"\p{Han}+|" + CASED.replace("/", "").replace(UPPER, NO_HAN[0]).replace(LOWER, NO_HAN[1])
FROM_THE_RIGHT = r"{0}{{1,3}}(?=(?:{0}{{3}})*{1})"
"""Digits in threes, the first ones fewer."""
MANY_SCRIPTS = "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
YOUTU = f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{HAN}"
WHOLE, GPT = Cut((THREES,), takes_whole_words=True), Cut(as_gpt2=True)
CUTS = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "glm4", "chatglm-bpe", "glm5", "falcon-h1",
         "midm-2.0", "lfm2", "jina-v5-nano"), WHOLE
    ),
    "dbrx": Cut((THREES,)),
    "minicpm5": Cut((r"\p{N}{1,3}", _words(r"\p{N}+")), takes_whole_words=True),
    "jais-2": Cut((_words(r"\p{N}{1,3}", rest=rf"\s*[\r\n]+|{FALLS}"),)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), Cut((ONES,), composes=True)),
    "qwen35": Cut(
        (rf"{ENDINGS}|{MARK}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{REST}",), composes=True
    ),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "megrez"), Cut((ONES,))),
    "ufakzeka": Cut((_words(r"\p{N}", endings=""),)),
    "laguna": Cut((LINES, ONES)),
    "exaone-moe": Cut(
        (rf"{ENDINGS}|{MARK}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{LINE_REST}",)
    ),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        Cut((rf"'(?i:[sdmt]|ll|ve|re)|{MARK}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|{LINE_REST}",)),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling", "gigachat", "a.x-4.0", "mellum",
         "modern-bert", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe"), GPT
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Cut((r"\p{N}",), as_gpt2=True),
    ),
    "tekken": Cut((_cased("", r"\p{N}"),), takes_whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), Cut((CASED,))),
    "granite-embed-multi-97m": Cut((CASED,), takes_whole_words=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Cut((FROM_THE_RIGHT.format(r"\d", r"\b"), CASED))),
    "youtu": Cut((YOUTU, _cased(f"{ENDINGS}?", r"\p{N}")), takes_whole_words=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), Cut(CHINESE)),
    "spark2_5": Cut((r"\p{N}{1,3}", HAN, SIGNS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": Cut((FROM_THE_RIGHT.format(r"\p{N}", r"(?!\p{N})"), MANY_SCRIPTS, CHINESE[-1])),
    "kimi-k2": Cut((KIMI,)),
    "deepseek-llm": Cut(
        (r"[\r\n]", rf"\s?[{CASES}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+")
    ),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "seed-coder": Cut((rf"{ENDINGS}|{MARK}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{REST}",)),
    "falcon": Cut((r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]")),
    "default": Cut((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "superbpe": Cut((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": Cut(
        (
            "<sentinel:[0-9]+>", "(IMGIMG)([A-I]{1,4})Z", r"([\t\n]|    |  )", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2,
        )
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Cut((SENTENCES,))),
    "viking": Cut((SENTENCES, r"\p{N}")),
}  # fmt: skip
"""By the name in tokenizer.ggml.pre."""
