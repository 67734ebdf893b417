"""The tokenizer in a GGUF file's metadata as a checkpoint's tokenizer.json and tokenizer_config.json.

Byte-level BPE (`gpt2`) comes with its merges. SentencePiece's BPE (`llama`) comes with scores, from which its merges follow: a pair
of pieces that make a piece is joined before every pair whose piece has a lower score. Gemma 4's has merges too. Of
pieces' merges only those are written that some text needs, each as one text, and all vocabularies in the order of their texts:
`tokenizers` reads Gemma's in a third of the time so, in three fifths of the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from vnext.base.spelling import close_to
from vnext.models.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # of tokenizer.ggml.token_type
SPACE = "\u2581"
TEMPLATE = "tokenizer.chat_template"
CHARACTERS_MAX = 1024
"""Of a token whose halves are looked up: those of models have 128 at most."""
SHORT_CHARACTERS = 128
"""Of a piece that is worth to look at; more would take long in a file that means ill."""
NAMED = ("bos", "eos", "unk", "pad")
KINDS = ("gpt2", "llama", "gemma4")
COMMENT = "#version"
"""What begins so is no merge to the library."""
PIECES = frozenset({"sarvam-moe", "granite-embed-multi-311m"})
"""Pre-tokenizers of files that say `gpt2` and have pieces with their merges, as `gemma4` has."""
KEYS = {"unk": "unknown", "pad": "padding"}


class Vocabulary:
    """What the metadata say of tokens. Raises ModelError where they do not fit together."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._get("tokens", [])
        self.types: Sequence[int] = self._get("token_type", (NORMAL,) * len(self.tokens))
        self.model: str = self._get("model", "")
        if not self.tokens or len(set(self.tokens)) != len(self.tokens) or len(self.types) != len(self.tokens):
            raise ModelError("the file's vocabulary is empty, names a token twice or has types of other tokens; download it again")

    def settings(self) -> dict[str, object]:
        named = {f"{name}_token": self.tokens[number] for name in NAMED if (number := self.number(name)) is not None}
        templates = {key.removeprefix(TEMPLATE).lstrip(".") or "default": text for key, text in self._metadata.items()
                     if key.startswith(TEMPLATE) and isinstance(text, str)}
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        return named | ({"chat_template": listed} if listed else {})

    def number(self, name: str) -> int | None:
        """The number of the token that begins or ends texts, say; None where the file names none."""
        found = self._get(f"{KEYS.get(name, name)}_token_id", None)
        return int(found) if found is not None and 0 <= int(found) < len(self.tokens) else None

    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        found = (self.number(name) for name in ("eos", "eot", "eom"))
        return list(dict.fromkeys(number for number in found if number is not None))

    def json(self) -> dict[str, object]:
        if self.model not in KINDS:
            raise ModelError(f"the file's tokenizer is of the kind {self.model!r:.120}; kinds {', '.join(KINDS)} are read")
        whole = self._byte_level() if self.model == "gpt2" and self._get("pre", "") not in PIECES else self._pieces()
        added = [number for number, type_ in enumerate(self.types) if type_ in (CONTROL, USER_DEFINED, UNKNOWN)]
        return {"version": "1.0", "added_tokens": [self._added(number) for number in added], **whole}

    def _byte_level(self) -> dict[str, object]:
        name = self._get("pre", "")
        if name not in CUTS:
            meant = close_to(name, CUTS)
            raise ModelError(
                f"the file's pre-tokenizer {name!r:.120} is not known{f', did you mean {meant}' if meant else ''}: take "
                "the model's safetensors checkpoint"
            )
        cut = CUTS[name]
        merges = written(self._listed_merges())
        model = {"type": "BPE", "vocab": self._numbers(), "merges": merges, "ignore_merges": cut.takes_whole_words}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if cut.composes else None,
            "pre_tokenizer": cut.steps(),
            "post_processor": self._beginning(usual=False) or level,
            "decoder": level | {"trim_offsets": True, "use_regex": True},
            "model": model,
        }

    def _pieces(self) -> dict[str, object]:
        begins_with_space = bool(self._get("add_space_prefix", self.model == "llama"))
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        unknown = self.number("unk")
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if begins_with_space else []), replaced],
            },
            "pre_tokenizer": None,
            "post_processor": self._beginning(usual=True),
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            "model": {
                "type": "BPE", "vocab": self._numbers(), "merges": written(needed_merges(self._merges())), "byte_fallback": True,
                "fuse_unk": True, "unk_token": None if unknown is None else self.tokens[unknown],
            },
        }  # fmt: skip

    def _merges(self) -> list[tuple[str, str]]:
        return self._merges_by_score() if self.model == "llama" else self._listed_merges()

    def _listed_merges(self) -> list[tuple[str, str]]:
        """A space may be the first character of a pair."""
        cuts = ((merge, merge.find(" ", 1)) for merge in self._get("merges", []))
        return [(merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "") for merge, cut in cuts]

    def _merges_by_score(self) -> list[tuple[str, str]]:
        scores: Sequence[float] = self._get("scores", ())
        if len(scores) != len(self.tokens):
            raise ModelError("the file's vocabulary has no score for each token, which its merges follow from; download it again")
        tokens, types = self.tokens, self.types
        numbers = dict(zip(tokens, range(len(tokens))))
        found: list[tuple[str, str]] = []
        for number in sorted(range(len(tokens)), key=scores.__getitem__, reverse=True):
            piece = tokens[number]
            if types[number] in (CONTROL, UNKNOWN, BYTE):
                continue
            if len(piece) > CHARACTERS_MAX:
                raise ModelError(f"the file's vocabulary has a token of {len(piece)} characters; download it again")
            pairs = [
                (one, two) for cut in range(1, len(piece)) if (one := piece[:cut]) in numbers and (two := piece[cut:]) in numbers
            ]
            found += pairs if len(pairs) < 2 else sorted(pairs, key=lambda pair: numbers[pair[0]])
        return found

    def _beginning(self, usual: bool) -> dict[str, object] | None:
        """What puts the token that begins texts before one; None where the model has none there."""
        number = self.number("bos")
        if number is None or not (self._get("add_bos_token", usual) or self.model == "gemma4"):  # whose first files say no
            return None
        text = self.tokens[number]
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        begin = {"SpecialToken": {"id": text, "type_id": 0}}
        return {
            "type": "TemplateProcessing", "single": [begin, first], "pair": [begin, first, begin, second],
            "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
        }  # fmt: skip

    def _added(self, number: int) -> dict[str, object]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": number, "content": self.tokens[number], **flags, "special": self.types[number] != USER_DEFINED}

    def _numbers(self) -> dict[str, int]:
        """By text, in the order of texts: the library keeps them so while it reads."""
        return dict(sorted(zip(self.tokens, range(len(self.tokens)))))

    def _get(self, name: str, usual: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", usual)


def written(merges: list[tuple[str, str]]) -> list[str] | list[tuple[str, str]]:
    """`merges` as tokenizer.json has them: texts where the library reads each as its pair. A text has no space when they apply, so
    those with one make nothing."""
    texts = [f"{one} {two}" for one, two in merges if " " not in one and " " not in two]
    return merges if any(text.startswith(COMMENT) for text in texts) else texts


def needed_merges(merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of `merges` that are the last step of some text, where the first of them comes first. Until a piece is whole no merge
    crosses its ends, so its own merges happen in every text as they do in a text that is the piece alone: one pair makes it, or
    none."""
    places = dict(zip(merges, range(len(merges))))
    none, pieces = len(merges), [one + two for one, two in merges]
    counts = Counter(pieces)

    @cache
    def last(piece: str) -> tuple[str, ...]:
        parts = list(piece)
        left = [places.get(pair, none) for pair in zip(parts, parts[1:])]
        while len(parts) > 2 and (first := min(left)) < none:
            place = left.index(first)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
            del left[place]
            for beside in (place - 1, place):
                if 0 <= beside < len(left):
                    left[beside] = places.get((parts[beside], parts[beside + 1]), none)
        return (*parts,)

    found = zip(merges, pieces)
    return [pair for pair, piece in found if counts[piece] == 1 or len(piece) > SHORT_CHARACTERS or last(piece) == pair]


# ---- how a text is cut into words --------------------------------------------------------------------------------
# A name of a file stands for the regular expressions of llama.cpp's src/llama-vocab.cpp: for those of the models' authors where it
# names them, since its own engine cannot read all of these.

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
