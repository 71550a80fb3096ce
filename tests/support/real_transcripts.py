"""The texts that faster-whisper makes of samples, for a process in its own environment:
`python real_transcripts.py MODEL SAMPLES.npy...` prints a JSON list for each file: [start, end, text] of segments.

Each option stands for the same way as ours: the best token of each step, one temperature, every window told nothing of
those before.
"""

import json
import sys

import numpy as np
from faster_whisper import WhisperModel

if __name__ == "__main__":
    model = WhisperModel(sys.argv[1], device="cpu", compute_type="float32", cpu_threads=2, local_files_only=True)
    for path in sys.argv[2:]:
        segments, _ = model.transcribe(
            np.load(path), language="en", beam_size=1, best_of=1, temperature=0.0, condition_on_previous_text=False,
            compression_ratio_threshold=None, log_prob_threshold=None, no_speech_threshold=None, vad_filter=False,
        )  # fmt: skip
        print(json.dumps([[round(s.start, 2), round(s.end, 2), s.text] for s in segments]))
