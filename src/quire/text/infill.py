"""Filling in the middle: a prompt of what stands before a gap and behind it (Bavarian et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer

BEFORE, BEHIND = "{before}", "{behind}"


@dataclass(frozen=True)
class Format:
    """The prompt in `parts`, tokens and the two texts. `ends`: tokens that models put behind what they filled in.

    `glued`: the text behind follows its mark without the space that the tokenizer writes before a text.
    """

    parts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    glued: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that mark the format."""
        return tuple(part for part in self.parts if part not in (BEFORE, BEHIND))


FORMATS = {
    "qwen2.5-coder": Format(("<|fim_prefix|>", BEFORE, "<|fim_suffix|>", BEHIND, "<|fim_middle|>"),
                            ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<|file_separator|>")),
    "starcoder": Format(("<fim_prefix>", BEFORE, "<fim_suffix>", BEHIND, "<fim_middle>"),
                        ("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    "santacoder": Format(("<fim-prefix>", BEFORE, "<fim-suffix>", BEHIND, "<fim-middle>"), ("<|endoftext|>",)),
    "codellama": Format(("\u2581<PRE>", BEFORE, "\u2581<SUF>", BEHIND, "\u2581<MID>"), ("\u2581<EOT>",), glued=True),
    "deepseek-coder": Format(("<\uff5cfim\u2581begin\uff5c>", BEFORE, "<\uff5cfim\u2581hole\uff5c>", BEHIND,
                              "<\uff5cfim\u2581end\uff5c>"), ("<|EOT|>",)),
    "codestral": Format(("[SUFFIX]", BEHIND, "[PREFIX]", BEFORE)),
}  # fmt: skip
"""By whose documentation; other models with the same tokens are asked in the same way."""

_STEM = "\u263a"


def format_of(tokenizer: Tokenizer) -> Format | None:
    """The format whose tokens the vocabulary has, all of them; None where it has none's."""
    return next((f for f in FORMATS.values() if all(tokenizer.token_to_id(m) is not None for m in f.marks)), None)


def infill(tokenizer: Tokenizer, found: Format, before: str | list[int], behind: str) -> list[int]:
    """Token ids of the prompt, with what the tokenizer puts at the beginning of any text."""
    ids = list(tokenizer.encode(""))
    for part in found.parts:
        if part == BEFORE:
            ids += before if isinstance(before, list) else tokenizer.encode(before, add_special_tokens=False)
        elif part == BEHIND:
            ids += _behind(tokenizer, behind, found.glued)
        else:
            token = tokenizer.token_to_id(part)
            assert token is not None, "the format was found by its tokens"
            ids.append(token)
    return ids


def ends_of(tokenizer: Tokenizer, found: Format) -> tuple[int, ...]:
    """Tokens that end what is filled in, beside the model's own end."""
    ids = (tokenizer.token_to_id(token) for token in (*found.marks, *found.ends))
    return tuple(token for token in ids if token is not None)


def _behind(tokenizer: Tokenizer, text: str, glued: bool) -> list[int]:
    if not glued:
        return tokenizer.encode(text, add_special_tokens=False)
    stem = tokenizer.encode(_STEM, add_special_tokens=False)
    return tokenizer.encode(_STEM + text, add_special_tokens=False)[len(stem) :]
