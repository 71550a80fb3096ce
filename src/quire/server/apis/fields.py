"""Fields that bodies of several APIs have: type and help."""

from __future__ import annotations

from typing import Annotated, Any

from quire.core.options.fields import about
from quire.core.options.ranges import within
from quire.core.params import (
    Bias,
    Logprobs,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)

Priority = Annotated[int, within(ge=-(2**31), le=2**31 - 1, words="must fit in 32 bits")]

ModelField = Annotated[
    str | None, about("Name of the model or of a LoRA adapter. The default is the server's first model.")
]
TemperatureField = Annotated[
    Temperature | None,
    about("Logits are divided by it; 0 = always the most probable token. The default is the model's, or 1."),
]
TopPField = Annotated[
    TopP | None, about("Sample only from the most probable tokens that together have this probability.")
]
PresencePenaltyField = Annotated[
    Penalty | None, about("Subtracted from the logit of every token that the output already has.")
]
FrequencyPenaltyField = Annotated[
    Penalty | None, about("Subtracted from a token's logit for each time that the output already has it.")
]
LogitBiasField = Annotated[
    dict[int, Bias] | None, about("Added to logits, by token id: -100 forbids a token, 100 forces it.")
]
SeedField = Annotated[
    Seed | None, about("Seed of sampling. The same request with the same seed gives the same output, bit for bit.")
]
StreamField = Annotated[bool | None, about("Send the output as a stream of events.")]
UserField = Annotated[Any, about("The tenant for --scheduling-policy fair, if the server has no API keys.")]
TopKField = Annotated[TopK | None, about("Sample only from this many most probable tokens; 0 or -1 = all.")]
MinPField = Annotated[
    MinP | None, about("Sample only from tokens with at least this share of the highest probability.")
]
RepetitionPenaltyField = Annotated[
    RepetitionPenalty | None, about("Divides the logits of tokens in the prompt or output (multiplies negative ones).")
]
IgnoreEosField = Annotated[bool | None, about("Ignore the model's end token.")]
SkipSpecialTokensField = Annotated[bool | None, about("Leave special tokens out of the text.")]
IncludeStopStrInOutputField = Annotated[bool | None, about("Include the stop string in the output.")]
TruncatePromptTokensField = Annotated[int | None, about("Use only this many last tokens of the prompt.")]
AddSpecialTokensField = Annotated[
    bool | None, about("Let the tokenizer add its special tokens. A chat template has added them already.")
]
PRIORITY = about("Under --scheduling-policy priority: lower comes first.")
PriorityField = Annotated[Priority | None, PRIORITY]
CacheSaltField = Annotated[
    str | None, about("Separates the prefix cache: a prompt finds only prefixes with the same salt.")
]
StructuredOutputsField = Annotated[
    Any, about("Structured output: one of json, regex, choice, grammar, json_object, structural_tag.")
]
TimingsPerTokenField = Annotated[
    bool | None,
    about("llama.cpp's: the reply, and each event of a stream, has timings: milliseconds, tokens per second."),
]
SuffixField = Annotated[str | None, about("Text after the gap, for models with fill-in-the-middle tokens.")]
AddGenerationPromptField = Annotated[bool | None, about("End the prompt with the beginning of an assistant message.")]
ContinueFinalMessageField = Annotated[bool | None, about("Continue the last message instead of starting a new one.")]
ChatTemplateKwargsField = Annotated[
    dict[str, Any] | None, about("More values for the chat template, for example enable_thinking.")
]
ToolsField = Annotated[
    list[dict[str, Any]] | None,
    about("Functions that the model may call: name, description, parameters as a JSON schema."),
]
TopLogprobsField = Annotated[
    Logprobs | None, about("Return logprobs of so many most probable tokens at each position.")
]
ToolChoiceField = Annotated[
    Any, about("auto, none, required, or a function that must be called. A grammar enforces required calls.")
]
DimensionsField = Annotated[int | None, about("Return only the first numbers of a vector, normalized again.")]
LoraNameField = Annotated[str, about("Name of the adapter. Requests use it as their model.")]
ReturnTokenStrsField = Annotated[bool | None, about("The reply has each token's text.")]
RequiredModelField = Annotated[
    str, about("Name of the model or of a LoRA adapter. The default is the server's first model.")
]
KeepAliveField = Annotated[
    Any,
    about(
        "Ignored: models stay until the server stops or another model needs the memory. The Warning header names it."
    ),
]
OptionsField = Annotated[
    Any, about("Ollama's: num_predict, temperature, top_k, top_p, min_p, seed, stop, repeat_penalty and others.")
]
