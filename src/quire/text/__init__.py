"""L1: text at the edge. Tokenizer, incremental detokenizer with stop strings, chat templates."""
