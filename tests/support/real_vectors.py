"""The vectors that sentence-transformers makes of texts, for a process in its own environment:
`python real_vectors.py MODEL TEXTS.json OUT.npy`."""

import json
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

if __name__ == "__main__":
    model = SentenceTransformer(sys.argv[1], device="cpu")
    texts = json.loads(Path(sys.argv[2]).read_text())
    np.save(sys.argv[3], model.encode(texts, batch_size=16, convert_to_numpy=True))
