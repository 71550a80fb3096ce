"""Tiny random models that hear, and transformers' as their oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import WhisperConfig, WhisperForConditionalGeneration

from model_variants import Encoded
from quire.audio.decoding import RATE
from quire.model.build import Model

LANGUAGES = ("en", "de", "fr")
TEXT = 256
"""Tokens of bytes, which come first."""
END, START = TEXT, TEXT + 1
LANGUAGE = START + 1
TRANSLATE = LANGUAGE + len(LANGUAGES)
TRANSCRIBE, START_LM, PREVIOUS, NO_SPEECH, NO_TIMES = (TRANSLATE + 1 + i for i in range(5))
TIMES = NO_TIMES + 1
VOCABULARY = TIMES + 101
"""Times up to 2 s, the length of a window."""
SIZES = {"d_model": 64, "decoder_layers": 2, "encoder_layers": 3, "decoder_attention_heads": 4,
         "encoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96}  # fmt: skip


def write_speech(
    folder: Path, seed: int = 0, rows: int = 100, positions: int = 96, scale: float = 4.0, **facts: Any
) -> WhisperForConditionalGeneration:
    """A tiny Whisper with a tokenizer of bytes; its encoder makes `rows` rows of a window."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCABULARY, max_source_positions=rows, max_target_positions=positions, pad_token_id=END,
        bos_token_id=END, eos_token_id=END, decoder_start_token_id=START, begin_suppress_tokens=[32, END],
        suppress_tokens=[], **SIZES | facts
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.normal_(1, 0.1)
            else:
                parameter.mul_(scale)
    told = {
        "lang_to_id": {f"<|{code}|>": LANGUAGE + i for i, code in enumerate(LANGUAGES)},
        "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        "is_multilingual": True, "no_timestamps_token_id": NO_TIMES, "max_initial_timestamp_index": 50,
        "prev_sot_token_id": PREVIOUS, "begin_suppress_tokens": [32, END], "suppress_tokens": [40, 41],
        "max_length": positions, "return_timestamps": False,
    }  # fmt: skip
    for name, value in told.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(
        f'{{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": {config.num_mel_bins}}}'
    )
    return model


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, and Whisper's special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>",
               "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]  # fmt: skip
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(101)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "WhisperTokenizer"}')


HEARING = {"whisper": write_speech}
"""Families that hear, and what writes a tiny model of each."""


def frames(seed: int, rows: int = 100, bins: int = 80) -> NDArray[np.float32]:
    """A window of made-up sound [2 rows, bins]."""
    return np.random.default_rng(seed).standard_normal((2 * rows, bins)).astype(np.float32)


def sound(seed: int, seconds: float) -> NDArray[np.float32]:
    """Made-up sound whose pitch wanders."""
    rng, count = np.random.default_rng(seed), round(seconds * RATE)
    pitch = np.interp(np.arange(count), np.linspace(0, count, 20), rng.uniform(100, 3000, 20))
    made = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE) + 0.05 * rng.standard_normal(count)
    return made.astype(np.float32)


class Heard(Encoded):
    """Sequences of a decoder behind windows of sound."""

    def __init__(self, model: Model, sounds: list[NDArray[np.float32]], sequences: list[list[int]]) -> None:
        self._sounds = sounds
        super().__init__(model, [[0] * model.spec.encoder.rows for _ in sounds], sequences)

    def given(self, number: int, tokens: list[int]) -> torch.Tensor:
        """The frames of a window."""
        return torch.from_numpy(self._sounds[number])


def heard(model: WhisperForConditionalGeneration, sound: NDArray[np.float32], decoded: list[int]) -> torch.Tensor:
    """transformers' logits [len(decoded), vocabulary] of the tokens `decoded` behind `sound`."""
    with torch.no_grad():
        features = torch.from_numpy(sound.T.copy())[None]
        found: torch.Tensor = model(input_features=features, decoder_input_ids=torch.tensor([decoded])).logits[0]
    return found
