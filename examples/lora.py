"""Train a LoRA adapter, and use it beside the base model."""

import json
import sys
import tempfile
from pathlib import Path

from quire import LLM, LoRARequest, SamplingParams
from quire.cli.app import app

QUESTION, ANSWER = "What is quire?", "A stack of paper."


def main(steps: int = 30) -> None:
    """Train on one question, as `quire train pydoc OUT --data FILE` does, then ask with and without the adapter."""
    with tempfile.TemporaryDirectory() as folder:
        data, adapter = Path(folder) / "data.jsonl", Path(folder) / "adapter"
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        data.write_text(json.dumps({"messages": turns}) + "\n")
        words = ["train", "pydoc", str(adapter), "--data", str(data), "--length", "32", "--batch", "1"]
        app([*words, "--rank", "8", "--rate", "0.01", "--steps", str(steps)], standalone_mode=False)

        with LLM(enable_lora=True) as llm:
            prompt = {"prompt_token_ids": llm.chat_template.encode(turns[:1])}
            for request in (None, LoRARequest("paper", 1, str(adapter))):
                params = SamplingParams(max_tokens=16, temperature=0.0)
                text = llm.generate(prompt, params, lora_request=request)[0].outputs[0].text
                print(f"{'with the adapter' if request else 'without'}: {text}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
