"""The APIs of OpenAI and vLLM, on which the others are built."""
