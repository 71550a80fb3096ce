"""Which tokens a text that is written of sound may go on with, as transformers and openai/whisper say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.speech import SpeechRules


def mask_of(rules: SpeechRules, said: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """Bits [V / 32] of the tokens that may follow the output `said` where a row of the model is logits [V]."""
    hidden = np.zeros(-(-len(logits) // 32) * 32, bool)
    hidden[list(rules.suppress)] = True
    if not said:
        hidden[list(rules.begin)] = True
    if rules.times:
        _hide_by_times(rules, said, logits, hidden[: len(logits)])
    return np.packbits(~hidden, bitorder="little").view(np.int32)


def _hide_by_times(
    rules: SpeechRules, said: Sequence[int], logits: NDArray[np.float32], hidden: NDArray[np.bool_]
) -> None:
    times = rules.times
    hidden[rules.untimed] = True
    if said and said[-1] >= times:
        if len(said) < 2 or said[-2] >= times:  # a pair is complete: text follows
            hidden[times:] = True
        else:  # a pair begins, or the end comes
            hidden[: rules.end] = True
    last = next((token for token in reversed(said) if token >= times), -1)
    if last >= 0:
        repeats = said[-1] >= times and len(said) > 1 and said[-2] < times
        hidden[times : last + (0 if repeats else 1)] = True
    if not said:
        hidden[:times] = True
        if rules.initial >= 0:
            hidden[times + rules.initial + 1 :] = True
    left = logits[times:][~hidden[times:]].astype(np.float64)
    words = logits[:times][~hidden[:times]]
    best = left.max(initial=-np.inf)
    if np.isfinite(best) and len(words) and best + np.log(np.exp(left - best).sum()) > words.max():
        hidden[:times] = True
