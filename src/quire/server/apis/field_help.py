"""What each field of requests means: for /openapi.json and the documentation's tables.

`MEANINGS` goes by the field's name, `OWN` by the body first, where a field means something else there. What is known
and refused says why in `UNBUILT` of `quire.server.apis.unsupported`.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.server.apis.unsupported import UNBUILT, WITHOUT_EFFECT

_NO_EFFECT = "Cannot change an answer here; the Warning header names it."
_SHAPE = "an older name of structured_outputs."

MEANINGS: dict[str, str] = {
    "model": "Name of the model or of a LoRA adapter; the server's first model if not given.",
    "prompt": "Text to continue, token ids, or a list of either: a choice for each.",
    "messages": "The conversation, oldest first: role (system, user, assistant, tool) and content: text, pictures.",
    "input": "A text, token ids, or a list of either: a vector for each.",
    "max_tokens": "Tokens to write at most; completions write 16 if not given, chat until the context is full.",
    "max_completion_tokens": "As max_tokens, reasoning counted in; the name that OpenAI prefers in chat.",
    "max_output_tokens": "Tokens to write at most, reasoning counted in.",
    "min_tokens": "Tokens to write before an end token or a stop string may end the answer.",
    "n": "Answers to each prompt; they share the prompt's keys and values.",
    "best_of": "Answers that are made, of which the n likeliest are returned.",
    "temperature": "Logits are divided by it; 0 = always the likeliest token. If not given, the model's default, or 1.",
    "top_p": "Only the likeliest tokens that have this probability together are drawn from.",
    "top_k": "Only this many likeliest tokens are drawn from; 0 or -1 = all.",
    "min_p": "Only tokens with at least this share of the likeliest token's probability are drawn from.",
    "presence_penalty": "Taken from the logit of every token that the answer has already, -2 to 2.",
    "frequency_penalty": "Taken from a token's logit for each time that the answer has it already, -2 to 2.",
    "repetition_penalty": "Logits of tokens that prompt or answer have are divided by it (multiplied where negative).",
    "logit_bias": "Added to logits, by token id: -100 forbids a token, 100 forces it.",
    "allowed_token_ids": "Only these tokens may be drawn.",
    "bad_words": "Words that the answer must not have.",
    "seed": "Fixes what is drawn: the same request gives the same answer, bit for bit.",
    "stop": "Texts that end the answer; they are not part of it.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "The model's end token does not end the answer.",
    "include_stop_str_in_output": "The text that ended the answer is part of it.",
    "stream": "Server-sent events, as tokens come.",
    "stream_options": "include_usage: a last event with usage; continuous_usage_stats: usage in each.",
    "echo": "The prompt is part of the answer, and of its log-probabilities.",
    "suffix": "Text behind the gap that is to be filled: models with tokens for filling in.",
    "logprobs": "Log-probabilities of the tokens; in completions a number: of so many likeliest ones, too.",
    "top_logprobs": "Log-probabilities of so many likeliest tokens at each place (20 at most).",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens, and of so many likeliest ones.",
    "use_beam_search": "The n likeliest answers by beam search in the place of drawing.",
    "length_penalty": "Exponent of the length by which beams' log-probabilities are divided.",
    "early_stopping": "Whether beam search ends with the first n finished beams.",
    "skip_special_tokens": "Special tokens are left out of the text.",
    "spaces_between_special_tokens": "Special tokens that are shown have spaces around them.",
    "add_special_tokens": "The tokenizer adds what it puts around texts; a chat template has done so already.",
    "truncate_prompt_tokens": "Only so many last tokens of the prompt are read.",
    "return_token_ids": "The reply has the ids of prompt and answer.",
    "return_tokens_as_token_ids": "Tokens in log-probabilities are written token_id:N.",
    "priority": "Under --scheduling-policy priority: lower comes first.",
    "cache_salt": "Parts the prefix cache: prompts are found again under the same salt alone.",
    "request_id": "The client's own id, in X-Request-Id and the logs.",
    "quire": 'timings: where the time went; cache: what the prefix cache had (see "Seeing what happened").',
    "user": "Who asks, where keys tell nobody apart: the tenant of --scheduling-policy fair.",
    "metadata": _NO_EFFECT,
    "response_format": "json_object, json_schema or structural_tag: the shape of the answer.",
    "structured_outputs": "The shape of the answer: one of json, regex, choice, grammar, json_object, structural_tag.",
    "guided_json": f"A JSON schema; {_SHAPE}",
    "guided_regex": f"A regular expression; {_SHAPE}",
    "guided_choice": f"A list of texts; {_SHAPE}",
    "guided_grammar": f"A grammar (Lark or GBNF); {_SHAPE}",
    "guided_decoding_backend": "Who reads grammars: guidance, and no other.",
    "guided_whitespace_pattern": "Spaces between tokens of JSON, as a regular expression.",
    "tools": "Functions that the model may call: name, description, parameters as a JSON schema.",
    "tool_choice": "auto, none, required, or a function that must be called; what must be is had by grammar.",
    "parallel_tool_calls": "Whether one answer may have several calls.",
    "reasoning_effort": "How long to think, where the chat template knows it: none, minimal, low, medium, high, xhigh.",
    "include_reasoning": "Whether reasoning is returned, in reasoning_content.",
    "chat_template_kwargs": "Further values for the chat template, as enable_thinking.",
    "add_generation_prompt": "Whether the prompt ends with the beginning of an answer.",
    "continue_final_message": "The last message is not ended, and the answer goes on with it.",
    "encoding_format": "float, or base64 of little-endian f32.",
    "dimensions": "Only the first so many numbers of a vector, divided by their length.",
    "normalize": "Whether a vector is divided by its length; as the model's files say if not given.",
    "text_1": "A text, or a list as long as text_2.",
    "text_2": "A text, or a list.",
    "query": "What documents are ranked by.",
    "documents": "Texts that are ranked.",
    "top_n": "So many best documents are returned; all if not given.",
    "return_documents": "Whether texts come back with their scores.",
    "instructions": "A system message before the input.",
    "include": "What else the reply has: message.output_text.logprobs.",
    "text": "format: the shape of the answer, as response_format of chat completions.",
    "reasoning": "effort: as reasoning_effort of chat completions.",
    "previous_response_id": "A stored response that this one goes on from.",
    "background": "Answer at once with an id; GET /v1/responses/{id} says what came.",
    "store": "Whether the response can be read and gone on from later.",
    "truncation": "disabled: what is too long is refused.",
    "lora_name": "The adapter's name, which requests give as their model.",
    "lora_path": "Its folder on the server's disk.",
    "load_inplace": "Whether it takes the place of one of the same name.",
    "lora_int_id": "vLLM's number of the adapter; adapters go by name here.",
    "tokens": "Token ids.",
    "return_token_strs": "The reply has each token's text.",
    "system": "A system message.",
    "thinking": "type enabled or disabled, and budget_tokens, as far as the chat template knows of them.",
    "output_config": "format: a JSON schema; effort: as reasoning_effort of chat completions.",
    "cache_control": "Prefixes are cached always: asks for nothing.",
    "stop_sequences": "Texts that end the answer.",
    "format": "json, or a JSON schema.",
    "options": "Ollama's: num_predict, temperature, top_k, top_p, min_p, seed, stop, repeat_penalty and others.",
    "think": "true, false or an effort: whether the model reasons.",
    "keep_alive": "Models stay until the server ends, or others need the room; the Warning header names it.",
    "raw": "The prompt is continued as it is, without the chat template.",
    "truncate": "Whether an input that is too long is cut; else it is refused.",
    "name": "What model was called before.",
    "images": "Pictures in base64, before what is said: for models that take them.",
    "verbose": "Asks for nothing here.",
    "n_predict": "Tokens to write at most; -1 = no limit but the context.",
    "repeat_penalty": "As repetition_penalty of completions.",
    "n_probs": "Log-probabilities of so many likeliest tokens.",
    "cache_prompt": "false: nothing that the prefix cache has is used.",
    "return_tokens": "The reply has token ids.",
    "grammar": "GBNF or Lark that the answer follows.",
    "json_schema": "A JSON schema that the answer follows.",
    "inputs": "The text to continue.",
    "parameters": "TGI's: max_new_tokens, do_sample, temperature, top_k, top_p, seed, stop, grammar and others.",
    "prompt_cache_retention": _NO_EFFECT,
}
"""By the name of the field."""
OWN: dict[str, dict[str, str]] = {
    "ResponsesRequest": {
        "input": "A text, or a list of items: messages, calls and their results.",
        "metadata": "Up to 16 texts by name, which come back with the response.",
        "prompt": "Refused: prompts are not kept; send instructions and input.",
        "tools": "Functions that the model may call; the server itself calls none.",
    },
    "MessagesRequest": {
        "max_tokens": "Tokens to write at most.",
        "metadata": "user_id: who asks, where keys tell nobody apart.",
    },
    "TokenizeText": {"prompt": "The text."},
    "GenerateRequest": {"prompt": "The text to answer, through the chat template unless raw."},
    "EmbeddingsRequest": {"prompt": "The text."},
    "TokenizeChat": {"documents": f"Refused: {UNBUILT['documents'][1]}."},
    "ChatCompletionRequest": {
        "documents": f"Refused: {UNBUILT['documents'][1]}.",
        "logprobs": "Log-probabilities of the answer's tokens.",
        "echo": f"Refused: {UNBUILT['echo'][1]}.",
    },
    "NamedModel": {"model": "Name of the model to load or unload."},
}
"""By the name of the body, where the field means something else."""


def meaning(body: str, field: str) -> str:
    """What `field` of the struct called `body` means. `KeyError` where nobody has said it."""
    found = OWN.get(body, {}).get(field) or MEANINGS.get(field)
    if found is None and field in WITHOUT_EFFECT:
        return _NO_EFFECT
    return found or f"Refused: {UNBUILT[field][1]}."


def describe(schema: dict[str, object], body: str, fields: Iterable[str]) -> None:
    """Write meanings into the schema of a body."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for name in fields:
        properties[name]["description"] = meaning(body, name)
