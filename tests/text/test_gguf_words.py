"""How GGUF files say that text is cut into words, and tokens that are texts instead of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.gguf.vocab import BYTE, CONTROL, NORMAL, Vocab
from quire.text.gguf_tokenizer import build
from quire.text.gguf_words import PRE, TEXTS, WHOLE_WORDS
from quire.text.tokenizer_bounds import check_growth

TEXT = "a1234567 12 1314151天! I've don'T\n\n  x我想apple    y"
SPACE = "\u2581"

WORDS = {
    "gpt-2": "a|1234567| 12| 1314151|天|!| I|'ve| don|'|T|\n\n | x我想apple|   | y",
    "llama3": "a|123|456|7| |12| |131|415|1|天|!| I|'ve| don|'T|\n\n| | x我想apple|   | y",
    "afmoe": "a|1|234|567| |12| |1|314|151|天|!| I|'ve| don|'T|\n\n| | x|我想|apple|   | y",
    "superbpe": "a|1|234|567| |12| |1|314|151|天! I've don'T\n\n  x我想apple    y",
    "kimi-k2": "a|123|456|7| |12| |131|415|1|天|!| I've| don'T|\n\n| | x|我想|apple|   | y",
    "tiny_aya": "a|1|234|567| |12| |131|415|1|天|!| I've| don'T|\n\n| | x我想apple|   | y",
    "jais-2": "a|123|456|7| |12| |131|415|1|天|!| I|'ve| don|'T|\n\n| | x我想apple|  | | y",
    "spark2_5": "a|1|2|3|4|5|6|7| |1|2| |1|3|1|4|1|5|1|天|!| I|'ve| don|'T|\n|\n| | x|我想|apple|   | y",
    "deepseek-llm": "a|1234567| |12| |1314151|天|!| I|'|ve| don|'|T|\n|\n| | x|我想|apple|   | y",
    "bailingmoe": "a|1|2|3|4|5|6|7| |1|2| |1|3|1|4|1|5|1|天|!| I|'ve| don|'T|\n\n| | x我想apple|   | y",
    "ufakzeka": "a|1|2|3|4|5|6|7| |1|2| |1|3|1|4|1|5|1|天|!| I|'ve| don|'T|\n\n| | x我想apple|   | y",
    "minicpm5": "a|123|456|7| |12| |131|415|1|天|!| I|'ve| don|'T|\n\n| | x我想apple|   | y",
    "exaone-moe": "a|1|2|3|4|5|6|7| |1|2| |1|3|1|4|1|5|1|天|!| I|'ve| don|'T|\n\n| | x我想apple|   | y",
    "laguna": "a|1|2|3|4|5|6|7| |1|2| |1|3|1|4|1|5|1|天|!| I|'ve| don|'T|\n\n| | x我想apple|   | y",
    "bloom": "a1234567| 12| 1314151天|!| I've| don'T|\n\n | x我想apple|   | y",
    "youtu": "a|1|2|3|4|5|6|7| |1|2| |1|3|1|4|1|5|1|天|!| I've| don'T|\n\n| | x|我想|apple|   | y",
    "gemma4": "a1234567 12 1314151天! I've don'T|\n\n|  x我想apple    y",
}
"""Way -> the words of TEXT, by reading the expressions of llama.cpp's src/llama-vocab.cpp."""
KNOWN_TO_LLAMA_CPP = {
    "default", "minicpm5", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
    "lfm2", "jina-v5-nano", "deepseek-llm", "deepseek-coder", "deepseek-v3", "spark2_5", "youtu", "falcon", "mpt",
    "starcoder", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0",
    "mellum", "modern-bert", "jais-2", "gemma4", "granite-embed-multi-311m", "sarvam-moe", "jina-v1-en",
    "jina-v2-code", "roberta-bpe", "whitespace", "refact", "command-r", "qwen2", "deepseek-r1-qwen", "kormo",
    "f2llmv2", "qwen35", "stablelm2", "olmo", "dbrx", "smaug-bpe", "poro-chat", "chatglm-bpe", "glm4", "glm5",
    "viking", "jais", "tekken", "smollm", "codeshell", "bloom", "gpt3-finnish", "exaone", "exaone4", "exaone-moe",
    "chameleon", "minerva-7b", "megrez", "gpt-4o", "llama4", "kanana2", "talkie", "granite-embed-multi-97m",
    "tiny_aya", "cohere2moe", "superbpe", "trillion", "granite-docling", "bailingmoe", "bailingmoe2", "llada-moe",
    "seed-coder", "hunyuan", "hunyuan-dense", "hy_v4", "joyai-llm", "kimi-k2", "ufakzeka", "grok-2", "afmoe",
    "laguna", "minimax-m2", "solar-open", "mellum2",
}  # fmt: skip


def words(pre: str, text: str) -> list[str]:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE[pre]]
    return [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


def test_every_way_of_llama_cpp_is_known() -> None:
    assert set(PRE) == KNOWN_TO_LLAMA_CPP and set(PRE) >= WHOLE_WORDS | TEXTS


@pytest.mark.parametrize("pre", WORDS)
def test_words(pre: str) -> None:
    assert words(pre, TEXT) == WORDS[pre].split("|")


@pytest.mark.parametrize("pre", PRE)
def test_nothing_of_a_text_is_lost(pre: str) -> None:
    assert "".join(words(pre, TEXT * 3)) == TEXT * 3
    vocab = Vocab("bpe", pre, ["a"], [NORMAL], [0.0], [], {}, (), False, False, False)
    assert check_growth(build(vocab, Path("x.gguf"))[0]) <= 64


def vocabulary(merges: list[tuple[str, str]], pre: str) -> Vocab:
    made = [left + right for left, right in merges]
    single = sorted({c for token in made for c in token} | {"\n", SPACE, "y", "z"})
    tokens = ["<bos>", *(f"<0x{i:02X}>" for i in range(256)), *single, *dict.fromkeys(made), "\n\n", "\n\n\n"]
    tokens = [*dict.fromkeys(tokens)]
    types = [CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 257)
    scores = [0.0] * len(tokens)
    return Vocab("bpe", pre, tokens, types, scores, merges, {"bos_token": 0}, (), True, False, False)


MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (SPACE, "hello"), (SPACE, "y"), (SPACE, SPACE)]


@pytest.mark.parametrize("lines", [[], [("\n", "\n"), ("\n\n", "\n")]])
def test_tokens_that_are_texts(lines: list[tuple[str, str]]) -> None:
    """As the tokenizer.json of Gemma 4: spaces are pieces, bytes stand for what is none, lines are whole tokens.

    llama.cpp takes a run of line ends that is a token whole, whether there are merges for it or not.
    """
    vocab = vocabulary(MERGES + lines, "gemma4")
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    full = [*MERGES, ("\n", "\n"), ("\n\n", "\n")]
    oracle = Tokenizer(models.BPE(ids, full, byte_fallback=True, fuse_unk=True))
    oracle.normalizer = normalizers.Replace(" ", SPACE)
    oracle.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    oracle.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    oracle.add_special_tokens([AddedToken("<bos>", normalized=False, special=True)])
    backend, named = build(vocab, Path("x.gguf"))
    assert named == {"bos_token": "<bos>"}
    for text in ("hello  hello y", "hello\n\n\nhello\n y", "\n", "天 hello\n\ny", " y  y"):
        found = backend.encode(text)
        assert found.ids == [0, *oracle.encode(text).ids]
        assert backend.decode(found.ids) == oracle.decode(found.ids) == text


def test_words_between_spaces_alone() -> None:
    backend, _ = build(vocabulary(MERGES, "whitespace"), Path("x.gguf"))
    assert backend.encode("hello  y\nhello").tokens == ["<bos>", "hello", "y", "hello"]
