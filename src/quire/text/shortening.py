"""Texts that are longer than a model reads: their beginning or their end, between the special tokens around them."""

from __future__ import annotations

from quire.text.tokenizer import Tokenizer


def shortened(tokenizer: Tokenizer, prompt: str | list[int], ids: list[int], limit: int, last: bool) -> list[int]:
    """Tokens `ids` of `prompt`, at most `limit`: the first, or the `last`; special tokens around a text stay."""

    def kept(tokens: list[int], count: int) -> list[int]:
        return tokens[-count:] if last else tokens[:count]

    if len(ids) <= limit or not isinstance(prompt, str):
        return kept(ids, limit)
    plain = tokenizer.encode(prompt, False)
    added = len(ids) - len(plain)
    before = next((i for i in range(added + 1) if ids[i : i + len(plain)] == plain), None)
    if before is None or added >= limit:
        return kept(ids, limit)
    return ids[:before] + kept(plain, limit - added) + ids[before + len(plain) :]
