"""Make requests from what callers give, as prompts and as sampling parameters, to a `Request` that the engine can take
unseen."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from quire.core.audio import PromptAudio
from quire.core.config import EngineConfig
from quire.core.errors import BadRequest, ContextTooLong
from quire.core.images import PromptImage, placeholders
from quire.core.params import SamplingParams
from quire.core.request import DecoderStart, Request, longest_prompt
from quire.engine.client import EngineInfo
from quire.text.structured.grammar_reader import READER, CompiledGrammar
from quire.text.structured.refused_grammars import REFUSED
from quire.text.structured.vocabulary import vocabulary_of
from quire.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
_SLICE = 64 << 10
"""Characters that are encoded alone to see how many tokens a long text has."""


Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
_FIELDS = {"prompt", "prompt_token_ids", "multi_modal_data"}


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt, and its images: their rows have ids beyond the vocabulary.

    `audio`: what an encoder reads in the place of the ids, which are of its digest; `decoder`: what the decoder's part
    begins with.
    """

    ids: Sequence[int]
    images: tuple[PromptImage, ...] = ()
    audio: PromptAudio | None = None
    decoder: tuple[int, ...] = ()


def hearing(info: EngineInfo, audio: PromptAudio, decoder: Sequence[int]) -> EncodedPrompt:
    """The prompt of a window of sound; `BadRequest` where the model takes none."""
    if info.decoder_start is None or not info.decoder_start.takes_audio:
        raise BadRequest("audio: this model takes no audio", param="file")
    rows = info.decoder_start.rows
    return EncodedPrompt(placeholders(audio.key, rows, info.vocab_size), (), audio, tuple(decoder))


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter in PEFT's format, loaded from the folder `lora_path` when it is first used.

    `lora_int_id` is what vLLM asks for; adapters are told apart by `lora_name` here.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


def listed(prompts: Any) -> list[Any]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise BadRequest(f"prompts: a {type(prompts).__name__} is neither text, token ids nor a list", param="prompts")
    items: list[Any] = list(prompts)
    if items and all(type(item) is int for item in items):
        return [items]
    for item in items:
        good = isinstance(item, (str, Mapping)) or (
            isinstance(item, Sequence) and all(type(token) is int for token in item)
        )
        if not good:
            raise BadRequest(f"prompts: {item!r:.80} is neither text, token ids nor a dict", param="prompts")
    return items


def conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation, or several, as a list."""
    if not messages:
        raise BadRequest("messages: must not be empty", param="messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def text_or_ids(prompt: Mapping[str, Any]) -> tuple[str | None, Sequence[int] | None]:
    """(text, token ids) of a prompt given as a dict; one may be None."""
    unknown = sorted(prompt.keys() - _FIELDS)
    if unknown or not prompt:
        raise BadRequest(f"prompt: need prompt or prompt_token_ids, not {unknown}", param="prompt")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is None and not isinstance(text, str):
        raise BadRequest(f"prompt: a {type(text).__name__} is not a string", param="prompt")
    return text, ids


class Seeds:
    """Seeds for requests that bring none: a fixed sequence for each `--seed`, so that a run can be repeated."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = 0

    def next(self) -> int:
        """A number of 63 bits."""
        digest = hashlib.blake2b(f"{self._seed}/{self._drawn}".encode(), digest_size=8).digest()
        self._drawn += 1
        return int.from_bytes(digest, "little") >> 1


LLAMA_CPP_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults, for a model that has none."""
_SAMPLED_BY = frozenset({"temperature", "top_k", "top_p", "min_p"})


def sampling_defaults(
    config: EngineConfig, info: EngineInfo, fallback: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Values for `SamplingParams` where a request gives none: generation_config.json's, or for "vllm" none (vLLM's).

    `fallback`: values for a model whose generation_config.json says nothing of sampling.
    """
    if config.model.generation_config == "vllm":
        return {}
    own = info.generation_defaults
    return own if not fallback or own.keys() & _SAMPLED_BY else {**fallback, **own}


def held(info: EngineInfo, prompt_tokens: int) -> int:
    """Tokens of the context that a prompt takes: an encoder's fills whole blocks, and the decoder's first follows."""
    return prompt_tokens if info.decoder_start is None else info.decoder_start.lead(prompt_tokens) + 1


def continued(info: EngineInfo, prompt: Sequence[int]) -> Sequence[int]:
    """The tokens that an output goes on behind: the prompt, or none where an encoder reads that."""
    return prompt if info.decoder_start is None else ()


def too_long(param: str, found: str, limit: int) -> ContextTooLong:
    """Why a prompt that came as the field `param` is refused; `found`: what it is, or has, as far as it was read."""
    return ContextTooLong(
        f"{param}: {found}, but the context holds {limit} and one must be left to generate", param=param
    )


def room(info: EngineInfo, prompt_tokens: int, param: str = "prompt") -> int:
    """How many tokens can follow a prompt, which came as the field `param`; `BadRequest` when none can."""
    if prompt_tokens == 0:
        raise BadRequest(f"{param}: must have at least one token", param=param)
    left = info.max_model_len - held(info, prompt_tokens)
    if left < 1:
        raise too_long(param, f"has {prompt_tokens} tokens", info.max_model_len)
    return left


def check_size(info: EngineInfo, tokenizer: Tokenizer, text: str, param: str = "prompt") -> None:
    """`ContextTooLong` for a text of so many bytes that no encoding of it fits: encoding 8 MB takes seconds."""
    if len(text) < info.max_model_len:
        return
    least = tokenizer.least_tokens(text)
    if held(info, least) > longest_prompt(info.max_model_len):
        raise too_long(param, f"{len(text)} characters are at least {least} tokens", info.max_model_len)
    check_tokens(tokenizer, text, info.max_model_len, param)


def check_tokens(tokenizer: Tokenizer, text: str, limit: int, param: str = "prompt") -> None:
    """`ContextTooLong` for a text of far more than `limit` tokens, found by its beginning: a list of millions of ids
    keeps the interpreter's lock for as long as it is made and thrown away.

    Parts have as many tokens as they have in the whole but for those at their ends; twice the limit leaves room.
    """
    count, at = 0, 0
    while len(text) > max(_SLICE, 4 * limit) and at < len(text) and count <= 2 * limit:
        count += len(tokenizer.encode(text[at : at + _SLICE], False))
        at += _SLICE
    if count > 2 * limit:
        raise too_long(param, f"{len(text)} characters are more than {count} tokens", limit)


def make_request(
    info: EngineInfo,
    prompt: Sequence[int] | EncodedPrompt,
    params: SamplingParams,
    *,
    request_id: str,
    seed: int,
    bad_words_ids: tuple[tuple[int, ...], ...] = (),
    priority: int = 0,
    adapter: str = "",
) -> Request:
    """Check lengths, ranges and token ids, and fix what the engine must not have to find out.

    `max_tokens` is cut to what the context leaves. `seed` is used when `params` has none. Raises `BadRequest` naming
    the field.
    """
    params.validate(info.vocab_size)
    ids, images, audio, decoder = prompt if isinstance(prompt, EncodedPrompt) else EncodedPrompt(prompt)
    limit = room(info, len(ids))
    if audio is None:
        _check_ids(info, ids, images)
    if info.decoder_start is not None and info.decoder_start.positions:  # what is negative is refused below
        limit = min(limit - max(0, len(decoder) - 1), info.decoder_start.positions - max(1, len(decoder)))
    if images and params.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: nothing predicts the rows of images; leave it out", param="prompt_logprobs")
    if info.decoder_start is not None and params.prompt_logprobs is not None:
        raise BadRequest(
            "prompt_logprobs: this model's prompt is read by an encoder, which predicts nothing",
            param="prompt_logprobs",
        )
    if params.stop and not params.detokenize:
        raise BadRequest("stop: stop strings need detokenize", param="stop")
    if params.max_tokens is None or params.max_tokens > limit:
        params = msgspec.structs.replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
    made = Request(
        id=request_id,
        prompt=tuple(ids),
        params=params,
        seed=params.seed if params.seed is not None else seed,
        arrival=time.monotonic(),
        eos_token_ids=info.eos_token_ids,
        bad_words_ids=bad_words_ids,
        priority=priority,
        adapter=adapter,
        images=images,
        audio=audio,
        decoder_prompt=decoder,
    )
    check_heard(info.decoder_start, info.vocab_size, made)
    return made


def check_heard(start: DecoderStart | None, vocab_size: int, request: Request) -> None:
    """`BadRequest` for sound that the model cannot take, or is without, and tokens that the decoder cannot begin
    with."""
    takes, audio, decoder = start is not None and start.takes_audio, request.audio, request.decoder_prompt
    if takes != (audio is not None):
        told = "reads audio and no text: use /v1/audio/transcriptions or LLM.transcribe" if takes else "takes no audio"
        raise BadRequest(f"prompt: this model {told}", param="prompt")
    if audio is None or start is None:
        if decoder:
            raise BadRequest("prompt: only models that read audio begin with several tokens", param="prompt")
        return
    if audio.bins != start.bins or len(audio.mel) != 8 * start.rows * start.bins:
        raise BadRequest(f"audio: this model reads {2 * start.rows} frames of {start.bins} numbers", param="file")
    if list(request.prompt) != placeholders(audio.key, start.rows, vocab_size):
        raise BadRequest("audio: the prompt's ids are not those of the audio", param="file")
    if decoder and not 0 <= min(decoder) <= max(decoder) < vocab_size:
        raise BadRequest(f"prompt: the decoder begins with a token that is not in [0, {vocab_size})", param="prompt")
    if len(decoder) >= start.positions:
        told = f"{len(decoder)} tokens before the text, and the decoder has {start.positions} positions"
        raise BadRequest(f"prompt: {told}", param="prompt")


def _check_ids(info: EngineInfo, ids: Sequence[int], images: Sequence[PromptImage]) -> None:
    """Each in the vocabulary, but for the rows of `images`, which have the ids of those."""
    text = _beside(info, ids, images) if images else ids
    if text and (min(text) < 0 or max(text) >= info.vocab_size):
        strange = next(t for t in text if not 0 <= t < info.vocab_size)
        raise BadRequest(f"prompt: token id {strange} is not in [0, {info.vocab_size})", param="prompt")


def _beside(info: EngineInfo, ids: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """The ids that are not of images."""
    if not info.takes_images:
        raise BadRequest("prompt: this model takes no images", param="prompt")
    text, at = list[int](), 0
    for image in images:
        drawn = placeholders(image.key, image.rows, info.vocab_size)
        for start, count in image.runs:
            text += ids[at:start]
            at = start + count
            if list(ids[start:at]) != drawn[:count]:
                raise BadRequest("prompt: rows of an image are not where it says", param="prompt")
            del drawn[:count]
    return [*text, *ids[at:]]


def with_grammar(vocab_size: int, tokenizer: Tokenizer, request: Request) -> Request:
    """`request` with the grammar of its structured outputs, and one text of it, which says how short it can be.

    Raises as `ask_grammar` and `add_grammar` do.
    """
    asked = ask_grammar(vocab_size, tokenizer, request)
    return request if asked is None else add_grammar(request, asked.result())


def ask_grammar(
    vocab_size: int, tokenizer: Tokenizer, request: Request, frame: str = ""
) -> Future[CompiledGrammar] | None:
    """The grammar of a request's structured outputs, to come in its tenant's turn; None where it has none.

    `frame`: what may stand around them (see `WeightReader.ask`). `BadRequest` naming the field when there is no such
    grammar; `Overloaded` when too many wait.
    """
    params = request.params
    if params.structured_outputs is None:
        return None
    ends = (*request.eos_token_ids, *params.stop_token_ids)
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    return READER.ask(params.structured_outputs, ends, vocabulary, frame, request.tenant)


def add_grammar(request: Request, read: CompiledGrammar) -> Request:
    """`request` with the grammar that was read; `BadRequest` when `max_tokens` cannot hold any text of it, or where an
    engine could not follow it for this tenant."""
    REFUSED.check(request.tenant, read.grammar)
    params, need = request.params, len(read.completion)
    if params.max_tokens is not None and params.max_tokens < need:
        raise BadRequest(
            f"max_tokens: {params.max_tokens} tokens cannot hold any answer of the shape asked for; {need} are needed",
            param="max_tokens",
        )
    params = msgspec.structs.replace(params, structured_outputs=None)
    return msgspec.structs.replace(request, params=params, grammar=read.grammar, completion=read.completion)


def ids_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text and after a space; `BadRequest` when they are too many."""
    if len(words) > MAX_BAD_WORDS or not all(0 < len(w) <= MAX_BAD_WORD_CHARS for w in words):
        raise BadRequest(
            f"bad_words: at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} characters", param="bad_words"
        )
    forms = [form for word in words for form in (word, " " + word.lstrip())]
    ids = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
    return tuple(dict.fromkeys(i for i in ids if i))
