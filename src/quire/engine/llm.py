"""The offline interface: `LLM(model).generate(prompts)`, with the names vLLM users know."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quire.core.config import EngineConfig
from quire.core.errors import BadRequest, ConfigError
from quire.core.params import SamplingParams
from quire.core.progress import counting_bar, loading_bar
from quire.core.request import random_id
from quire.engine.beam import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, search
from quire.engine.client import EngineInfo
from quire.engine.engine_options import engine_config
from quire.engine.local import LocalEngine
from quire.engine.outputs import RequestBuilder, RequestOutput
from quire.engine.requests import (
    EncodedPrompt,
    LoRARequest,
    Message,
    Prompt,
    Seeds,
    check_size,
    continued,
    conversations,
    ids_of_words,
    listed,
    make_request,
    room,
    sampling_defaults,
    text_or_ids,
    with_grammar,
)
from quire.engine.speech.calls import SpeechCalls
from quire.features.images.edge_image_sources import ImageSource, images_of, without_images
from quire.features.pooling.edge_embedding import PoolingCalls
from quire.model.disk.tokenizer import model_template, model_tokenizer
from quire.text.detokenizer import continuation
from quire.text.structured.answer_checks import checks_of
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.features.images.edge_image_preparation import Preparer
    from quire.images.prompt import PreparedImage


@dataclass(frozen=True, slots=True)
class GenerateDelta:
    """What a step adds: `text` of continuation `index` of prompt number `prompt`; `output` once that prompt is done."""

    prompt: int
    index: int
    text: str
    output: RequestOutput | None


class PromptReader:
    """Reads prompts for a model, each of its tools when first needed."""

    def __init__(self, config: EngineConfig, info: EngineInfo) -> None:
        self._config, self._info = config, info

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's, or that of the `tokenizer` option."""
        return model_tokenizer(self._config.model, self._info.folder, self._info.vocab_size)

    @cached_property
    def template(self) -> ChatTemplate:
        """Template of the model or of the `chat_template` option; `BadRequest` when there is none."""
        info = self._info
        found = model_template(self._config.model, info.folder, self.tokenizer, info.max_model_len)
        if found is None:
            raise BadRequest(f"{info.folder} has no chat template; use generate, or give chat_template")
        return found

    @cached_property
    def preparer(self) -> Preparer:
        """Reads images."""
        from quire.features.images.edge_image_preparation import Preparer

        return Preparer(self._info, self._config.media, self.tokenizer)

    def read(self, prompt: Prompt) -> tuple[str | None, EncodedPrompt]:
        """The text of a prompt, None where ids were given, and its ids with its images."""
        if isinstance(prompt, str):
            check_size(self._info, self.tokenizer, prompt)
            return prompt, EncodedPrompt(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Mapping):
            return None, EncodedPrompt(prompt)
        text, ids = text_or_ids(prompt)
        if isinstance(ids, EncodedPrompt):
            return text, ids
        sources = images_of(prompt.get("multi_modal_data"))
        if sources:
            return text, self._seen(text, ids, sources)
        return self.read(text or "") if ids is None else (text, EncodedPrompt(ids))

    def _seen(self, text: str | None, ids: Sequence[int] | None, sources: Sequence[ImageSource]) -> EncodedPrompt:
        """A text with marks of images, or ids in which each has as many image tokens as it has rows."""
        preparer = self.preparer
        preparer.admit(sources)
        if text is not None and ids is None:
            preparer.check_marks(text, len(sources), "prompt")
            return preparer.encode(text, self._prepared(sources), "prompt", special=True)
        return preparer.place(list(ids or ()), self._prepared(sources), "prompt_token_ids")

    def _prepared(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        return [self.preparer.prepare(source, alone=len(sources) == 1) for source in sources]

    def of_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        **variables: Any,
    ) -> Prompt:
        """The prompt of a conversation, through the model's chat template or the text `chat_template`."""
        template = self.template if chat_template is None else ChatTemplate({"default": chat_template}, self.tokenizer)
        sources: list[ImageSource] = []
        plain = [without_images(message, f"messages[{i}]", sources) for i, message in enumerate(messages)]
        if not sources:
            return {"prompt_token_ids": template.encode(plain, tools, **variables)}
        self.preparer.admit(sources)
        text = template.marked(plain, tools, image_mark=self.preparer.mark, **variables)
        self.preparer.check_marks(text, len(sources), "messages")
        return {"prompt_token_ids": self.preparer.encode(text, self._prepared(sources), "messages")}


class LLM(PoolingCalls, SpeechCalls):
    """A model loaded into this process. One call at a time; use the server for concurrent callers.

    `model`: a folder, a hub name, or "" for the bundled model. `options`: the command line's names with underscores
    (`block_size=32`); see `quire serve --help`. Raises `ConfigError` or `ModelError`, which name what is wrong.
    """

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        self._load(engine_config({"model": model, **options}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An `LLM` from options that are checked already."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: EngineConfig) -> None:
        self.config = config
        with loading_bar() as progress:
            self._engine: LocalEngine | None = LocalEngine(self.config, progress)
        self.info: EngineInfo = self._engine.info
        self._seeds = Seeds(self.config.model.seed)
        self._reader = PromptReader(self.config, self.info)

    @property
    def engine(self) -> LocalEngine:
        """The engine itself, for benchmarks and tests."""
        if self._engine is None:
            raise ConfigError("this LLM was closed; make a new one")
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, or that of the `tokenizer` option; read when first needed."""
        return self._reader.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, unless `generation_config="vllm"`."""
        return SamplingParams(**sampling_defaults(self.config, self.info))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list of them.

        A dict may have images: `"multi_modal_data": {"image": [...]}`, PIL images, arrays uint8 [height, width, 3],
        paths, bytes or data: URLs, in the order of the marks that the text has for them.
        One `sampling_params` or `lora_request` for all, or one each; None takes the model's defaults, or no adapter.
        `use_tqdm` shows a progress bar on a terminal. Raises `BadRequest` before anything runs if one prompt cannot.
        """
        builders = self._builders(prompts, sampling_params, priority, lora_request)
        with counting_bar(len(builders), "prompts", use_tqdm) as count:
            for delta in self._run(builders):
                if delta.output is not None:
                    count()
        return [b.result() for b in builders]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        special: frozenset[int] = frozenset(),
    ) -> Generator[GenerateDelta, None, None]:
        """Generate, with texts that come as they grow. Closing the iterator ends what still runs.

        `special`: special tokens that stay in the texts although others are left out, as marks of tool calls may.
        """
        return self._run(self._builders(prompts, sampling_params, special=special))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template or the text `chat_template`.

        Contents may be lists of parts, images among them: `{"type": "image", "image": ...}` as in `generate`, or
        OpenAI's `image_url`.
        """
        prompts = [
            self._reader.of_chat(
                conversation,
                tools,
                chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Prompt:
        """The prompt that `chat` would make of one conversation, images included: for `stream`, as the answer grows."""
        return self._reader.of_chat(messages, tools, None)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of the model or of the `chat_template` option; `BadRequest` when there is none."""
        return self._reader.template

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` best continuations of every prompt. Beams share blocks of the KV cache."""
        params.validate()
        if self.info.decoder_start is not None:
            raise BadRequest("beam_search: this model's encoder would read the beams as prompts; use generate")
        rows = [ids for _, ids in map(self._tokens, listed(prompts))]
        limits = [room(self.info, len(ids)) for ids in rows]
        one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, detokenize=False)

        def step(prefixes: list[tuple[int, ...]]) -> list[list[tuple[int, float]]]:
            found = self.generate([{"prompt_token_ids": p} for p in prefixes], one, use_tqdm=False)
            return [[(t, entry.logprob) for t, entry in (f.outputs[0].logprobs or [{}])[0].items()] for f in found]

        eos, tokenizer = self.info.eos_token_ids, self.get_tokenizer()
        return [
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        tokens=[*prompt, *beam.tokens],
                        text=continuation(tokenizer, prompt, beam.tokens[:-1] if beam.ended else beam.tokens),
                        cum_logprob=beam.logprob,
                        finish_reason="stop" if beam.ended else "length",
                    )
                    for beam in beams
                ]
            )
            for prompt, beams in zip(rows, search(rows, limits, params, eos, step), strict=True)
        ]

    def close(self) -> None:
        """Free the model; the object cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _builders(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None = None,
        special: frozenset[int] = frozenset(),
    ) -> list[RequestBuilder]:
        """Check everything and make the requests."""
        items = listed(prompts)
        params = self.get_default_sampling_params() if params is None else params
        each = [params] * len(items) if isinstance(params, SamplingParams) else list(params)
        ranks = [0] * len(items) if priority is None else list(priority)
        adapters = [lora] * len(items) if lora is None or isinstance(lora, LoRARequest) else list(lora)
        named: tuple[tuple[str, list[Any]], ...] = (
            ("sampling_params", each), ("priority", ranks), ("lora_request", adapters),
        )  # fmt: skip
        for name, values in named:
            if len(values) != len(items):
                raise BadRequest(f"{name}: {len(values)} for {len(items)} prompts; give one, or one each", param=name)
        if any(ranks) and self.config.scheduler.scheduling_policy != "priority":
            raise BadRequest('priority: has no effect without scheduling_policy="priority"', param="priority")
        names = ["" if a is None else self.engine.with_adapter(a.lora_name, a.lora_path) for a in adapters]
        return [self._builder(*row, special) for row in zip(items, each, ranks, names, strict=True)]

    def _builder(
        self, prompt: Prompt, params: SamplingParams, priority: int, adapter: str, special: frozenset[int] = frozenset()
    ) -> RequestBuilder:
        text, encoded = self._reader.read(prompt)
        reads = params.detokenize or params.bad_words or params.structured_outputs is not None
        tokenizer = self.get_tokenizer() if reads else None
        request = make_request(
            self.info,
            encoded,
            params,
            request_id=random_id(),
            seed=self._seeds.next(),
            bad_words_ids=ids_of_words(tokenizer, params.bad_words) if tokenizer is not None else (),
            priority=priority,
            adapter=adapter,
        )
        if tokenizer is not None:
            request = with_grammar(self.info.vocab_size, tokenizer, request)
        shown = self._reader.preparer.shown(encoded.ids, encoded.images) if encoded.images else None
        structured, before = params.structured_outputs, continued(self.info, request.prompt)
        checks = None if structured is None else checks_of(structured)
        return RequestBuilder(request, text, tokenizer, before, shown, checks, special)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """(text or None, token ids) of one prompt without images."""
        text, encoded = self._reader.read(prompt)
        if encoded.images:
            raise BadRequest("multi_modal_data: only generate and chat take images", param="multi_modal_data")
        return text, encoded.ids

    def _run(self, builders: list[RequestBuilder]) -> Generator[GenerateDelta, None, None]:
        """Drive the engine until all have finished; whatever ends early is aborted."""
        engine, live = self.engine, {b.request.id: b.request for b in builders}
        with closing(engine.run(live)) as outputs:
            for number, output in outputs:
                builder = builders[number]
                text, finished = builder.push(output), builder.finished
                if output.finish_reason is None and builder.outputs[output.index].finish_reason is not None:
                    engine.abort(output.request_id, output.index)
                if finished:
                    del live[output.request_id]
                yield GenerateDelta(number, output.index, text, builder.result() if finished else None)
