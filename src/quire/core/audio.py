"""Sound of a prompt: what an encoder reads in the place of tokens, under ids beyond the vocabulary.

The ids are made from a digest of the sound, as those of images are (`quire.core.images`).
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from numpy.typing import NDArray


class PromptAudio(msgspec.Struct, frozen=True, kw_only=True):
    """A window of sound: its spectrogram, f32 [frames, bins] in C order, and the digest of that, `key`."""

    key: bytes
    mel: bytes
    bins: int

    @classmethod
    def of(cls, mel: NDArray[np.float32]) -> PromptAudio:
        """The window whose spectrogram is mel [frames, bins]."""
        data = np.ascontiguousarray(mel, "<f4").tobytes()
        return cls(key=hashlib.blake2b(data, digest_size=16).digest(), mel=data, bins=mel.shape[1])

    @property
    def frames(self) -> NDArray[np.float32]:
        """The spectrogram [frames, bins]."""
        return np.frombuffer(self.mel, "<f4").reshape(-1, self.bins)
