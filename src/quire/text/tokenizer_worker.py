"""The process that encodes texts by a tokenizer which may take long over them: `quire.text.tokenizer_process` starts
it.

Its first message is the tokenizer, as JSON; others are texts, each encoded in a fork under the kernel's bounds.
`tokenizer_worker.py FOLDERS MEMORY SHARE`: bytes that a fork may have beside those of the process, and for each of a
text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tokenizers import Tokenizer

from quire.text.fork_server import receive, send, serve


def main(memory: int, share: int) -> None:
    """Load the tokenizer, and answer jobs until the socket ends."""
    send(b"{}")
    backend = Tokenizer.from_str(receive()[0].decode("utf-8", "surrogatepass"))

    def do(data: bytes) -> dict[str, Any]:
        job = json.loads(data)
        if job["normalize"]:
            return {"text": backend.normalizer.normalize_str(job["text"])}
        try:
            # one by one: a batch is worked on by threads, which are not in a fork
            found = backend.encode(job["text"], add_special_tokens=job["around"])
            return {"ids": found.ids, "special_tokens_mask": found.special_tokens_mask, "offsets": found.offsets}
        except BaseException as error:  # the library's panics are no `Exception`
            if isinstance(error, MemoryError):
                raise
            return {"error": str(error)[:300]}

    serve(do, memory, share)


if __name__ == "__main__":
    main(*map(int, sys.argv[3:]))
