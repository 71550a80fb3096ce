"""Which tokenizer and which chat template go with a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.config import ModelConfig
from quire.gguf.file import is_gguf
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.text.template import ChatTemplate


def tokenizer_folder(options: ModelConfig, own: str | Path) -> Path:
    """The folder or GGUF file of the tokenizer: that of the model, `own`, unless `--tokenizer` names another one or a
    model on the hub. `ConfigError` or `ModelError` where there is none of that name."""
    name = options.tokenizer
    if not name:
        return Path(own)
    if Path(name).is_dir() or is_gguf(Path(name)):  # it need not be a model
        return Path(name)
    # A server reads no models beside this one, and most name no tokenizer.
    from quire.model.disk.checkpoint import resolve
    from quire.store.hub import hub_beside

    return resolve(name, hub_beside(options))


def model_tokenizer(options: ModelConfig, own: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer itself; `ModelError` where it has tokens beyond the model's `vocab_size`."""
    tokenizer = Tokenizer.from_folder(tokenizer_folder(options, own))
    tokenizer.check_vocab(vocab_size)
    return tokenizer


def model_template(
    options: ModelConfig, own: str | Path, tokenizer: Tokenizer, max_model_len: int
) -> ChatTemplate | None:
    """The template in the file `--chat-template`, else that which lies with the tokenizer; None where there is none."""
    from quire.text.template import ChatTemplate  # engines read tokenizers and render nothing

    return ChatTemplate.from_folder(tokenizer_folder(options, own), tokenizer, options.chat_template, max_model_len)
