"""Fields that bodies of several APIs have: type and help."""

from __future__ import annotations

from typing import Annotated, Any

from quire.core.options.fields import about

ModelField = Annotated[
    str | None, about("Name of the model or of a LoRA adapter; the server's first model if not given.")
]
TemperatureField = Annotated[
    float | None,
    about("Logits are divided by it; 0 = always the likeliest token. If not given, the model's default, or 1."),
]
TopPField = Annotated[
    float | None, about("Only the likeliest tokens that have this probability together are drawn from.")
]
PresencePenaltyField = Annotated[
    float | None, about("Taken from the logit of every token that the answer has already, -2 to 2.")
]
FrequencyPenaltyField = Annotated[
    float | None, about("Taken from a token's logit for each time that the answer has it already, -2 to 2.")
]
LogitBiasField = Annotated[
    dict[int, float] | None, about("Added to logits, by token id: -100 forbids a token, 100 forces it.")
]
SeedField = Annotated[int | None, about("Fixes what is drawn: the same request gives the same answer, bit for bit.")]
StreamField = Annotated[bool | None, about("Server-sent events, as tokens come.")]
UserField = Annotated[Any, about("Who asks, where keys tell nobody apart: the tenant of --scheduling-policy fair.")]
TopKField = Annotated[int | None, about("Only this many likeliest tokens are drawn from; 0 or -1 = all.")]
MinPField = Annotated[
    float | None, about("Only tokens with at least this share of the likeliest token's probability are drawn from.")
]
RepetitionPenaltyField = Annotated[
    float | None, about("Logits of tokens that prompt or answer have are divided by it (multiplied where negative).")
]
IgnoreEosField = Annotated[bool | None, about("The model's end token does not end the answer.")]
SkipSpecialTokensField = Annotated[bool | None, about("Special tokens are left out of the text.")]
IncludeStopStrInOutputField = Annotated[bool | None, about("The text that ended the answer is part of it.")]
TruncatePromptTokensField = Annotated[int | None, about("Only so many last tokens of the prompt are read.")]
AddSpecialTokensField = Annotated[
    bool | None, about("The tokenizer adds what it puts around texts; a chat template has done so already.")
]
PriorityField = Annotated[int | None, about("Under --scheduling-policy priority: lower comes first.")]
CacheSaltField = Annotated[
    str | None, about("Parts the prefix cache: prompts are found again under the same salt alone.")
]
StructuredOutputsField = Annotated[
    Any, about("The shape of the answer: one of json, regex, choice, grammar, json_object, structural_tag.")
]
SuffixField = Annotated[
    str | None, about("Text behind the gap that is to be filled: models with tokens for filling in.")
]
AddGenerationPromptField = Annotated[bool | None, about("Whether the prompt ends with the beginning of an answer.")]
ContinueFinalMessageField = Annotated[
    bool | None, about("The last message is not ended, and the answer goes on with it.")
]
ChatTemplateKwargsField = Annotated[
    dict[str, Any] | None, about("Further values for the chat template, as enable_thinking.")
]
ToolsField = Annotated[
    list[dict[str, Any]] | None,
    about("Functions that the model may call: name, description, parameters as a JSON schema."),
]
TopLogprobsField = Annotated[
    int | None, about("Log-probabilities of so many likeliest tokens at each place (20 at most).")
]
ToolChoiceField = Annotated[
    Any, about("auto, none, required, or a function that must be called; what must be is had by grammar.")
]
DimensionsField = Annotated[int | None, about("Only the first so many numbers of a vector, divided by their length.")]
LoraNameField = Annotated[str, about("The adapter's name, which requests give as their model.")]
ReturnTokenStrsField = Annotated[bool | None, about("The reply has each token's text.")]
RequiredModelField = Annotated[
    str, about("Name of the model or of a LoRA adapter; the server's first model if not given.")
]
KeepAliveField = Annotated[
    Any, about("Models stay until the server ends, or others need the room; the Warning header names it.")
]
OptionsField = Annotated[
    Any, about("Ollama's: num_predict, temperature, top_k, top_p, min_p, seed, stop, repeat_penalty and others.")
]
