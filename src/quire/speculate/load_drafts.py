"""Loading what drafts: a model beside the target, or the target at fewer bits or with fewer layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Protocol

from msgspec.structs import replace

from quire.core.config import EngineConfig, LoraConfig, SpeculationConfig
from quire.core.errors import ConfigError, ModelError
from quire.core.files import LoadProgress
from quire.core.offload import OffloadConfig
from quire.core.parallel import ParallelConfig
from quire.core.speculation import HEADS, LOOK_UPS, MOST_TOKENS, Speculation, TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.build import Model, load_model
from quire.model.disk.checkpoint import resolve
from quire.model.disk.tokenizer import tokenizer_folder
from quire.model.net.audio_encoder import AudioEncoder
from quire.model.net.decoder import Decoder
from quire.model.net.hidden_taps import Taps
from quire.ops.backend import Ops
from quire.parallel.experts import NOT_DIVIDED
from quire.parallel.rank_place import ALONE, RankPlace
from quire.run.caches import Caches
from quire.run.step import ModelStep
from quire.speculate.assistant_model import load_assistant
from quire.speculate.dflash import DFlash, load_dflash
from quire.speculate.draft_encoder import EncodedDrafter, check_encoders, shared_encoder
from quire.speculate.drafter import Drafter, ModelDrafter
from quire.speculate.eagle import load_eagle
from quire.speculate.medusa import load_medusa
from quire.speculate.mtp import load_mtp
from quire.speculate.ngram import NGram
from quire.speculate.proposer import Proposer
from quire.speculate.suffix import SuffixDecoding
from quire.store.hub import hub_beside
from quire.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class DraftHeads(Protocol):
    """What drafts from hidden rows of the target, which it says in `taps`."""

    @property
    def taps(self) -> Taps:
        """The rows."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        ...

    def proposer(
        self, target: ModelStep, step: ModelStep | None, form: TreeForm | None, features: ImageFeatures | None = None
    ) -> Proposer:
        """The proposer that drafts with them; `step` runs them where they have layers of their own, `form` is of
        trees, `features` of images."""
        ...


@dataclass(frozen=True)
class Drafting:
    """What was asked, and the model that drafts; None where none does. `keeps`: it has keys and values of its own.

    `heads` that draft from the target's hidden rows. `everywhere`: every rank computes it, not the first alone.
    `block_rows`: rows of a sequence in one pass, each of which is a sequence of its own to the step. `reads`: layers of
    the target, whose caches are those of the model's layers.
    """

    asked: Speculation
    model: Model | None = None
    keeps: bool = False
    heads: DraftHeads | None = None
    everywhere: bool = False
    block_rows: int = 1
    reads: tuple[int, ...] = ()

    @property
    def taps(self) -> Taps | None:
        """The hidden rows that each step of the target must leave."""
        return None if self.heads is None else self.heads.taps

    @property
    def beside(self) -> tuple[Model, ...]:
        """The model, where it needs room in the blocks."""
        return (self.model,) if self.model is not None and self.keeps else ()

    @property
    def first_rank_only(self) -> bool:
        """Whether a part of the blocks is the first rank's alone."""
        return self.keeps and not self.everywhere

    def part(self, caches: Caches) -> Caches:
        """The model's caches among all there are."""
        return caches.part(1) if self.keeps else caches.part(0, self.reads or range(self.asked.layers) or None)

    def proposer(self, step: ModelStep | None, target: ModelStep, features: ImageFeatures | None = None) -> Proposer:
        """`step` runs the model, `target` the target. `features`: of images, where the target takes any."""
        if self.heads is not None:
            return self.heads.proposer(target, step, self.asked.tree, features)
        if step is None or self.model is None:
            if self.asked.method == "suffix":
                return SuffixDecoding(self.asked)
            return NGram(self.asked.prompt_lookup_min, self.asked.prompt_lookup_max, self.asked.tree)
        kind = Drafter
        if self.keeps:
            kind = EncodedDrafter if self.model.spec.encoder_decoder else ModelDrafter
        weights = 0 if self.asked.layers else self.model.weight_bytes
        return kind(step, target.model.spec.vocab_size, weights, self.asked.tree)


def load_everywhere(config: EngineConfig, target: Model, ops: Ops, place: RankPlace) -> Drafting | None:
    """What a rank that is not the first has of `load_drafting`: all of it, or nothing where the first drafts alone."""
    asked = config.speculation.asked
    if asked is None or not config.parallel.drafts_everywhere(asked):
        return None
    return load_drafting(config, target, ops, None, place)


def load_drafting(
    config: EngineConfig, target: Model, ops: Ops, progress: LoadProgress | None, place: RankPlace = ALONE
) -> Drafting | None:
    """Load what `config.speculation` asks for, beside the loaded `target`; `ConfigError` where they do not fit.

    `place`: this rank's, which has a share of a model that all ranks compute.
    """
    asked = config.speculation.asked
    if asked is None:
        return None
    everywhere = config.parallel.drafts_everywhere(asked)
    return changed(_drafting(config, asked, target, ops, progress, place), everywhere=everywhere)


def _drafting(
    config: EngineConfig,
    asked: Speculation,
    target: Model,
    ops: Ops,
    progress: LoadProgress | None,
    place: RankPlace,
) -> Drafting:
    if asked.method in LOOK_UPS:
        return Drafting(asked)
    if asked.method in HEADS:
        return _load_heads(config, asked, target, ops)
    if asked.method == "mtp":
        return _load_mtp(config, asked, target, ops, _split(config, asked, place))
    if asked.layers:
        return Drafting(asked, _first_layers(target, asked.layers))
    if asked.method == "self":
        return Drafting(asked, _load(config, config.model.model, asked.quantization, ops, progress, place))
    assert asked.model is not None
    check_tokens(config, target, asked.model)
    split, encoder = _split(config, asked, place), shared_encoder(config, target, asked.model)
    drafts = _load(config, asked.model, asked.quantization, ops, progress, split, encoder)
    check_encoders(target, drafts, asked.model)
    if any(drafts.states):
        raise ConfigError(
            f"--speculative-config: {asked.model} has layers with a recurrent state, and drafts take tokens back; "
            "choose a draft model without such layers",
            param="speculative_config",
        )
    return Drafting(asked, drafts, keeps=True)


def _split(config: EngineConfig, asked: Speculation, place: RankPlace) -> RankPlace:
    """The ranks that a model beside the target is split over, among which its experts are not divided."""
    return changed(place, experts=NOT_DIVIDED) if config.parallel.drafts_everywhere(asked) else ALONE


def _load(
    config: EngineConfig,
    model: str,
    quantization: str | None,
    ops: Ops,
    progress: LoadProgress | None,
    place: RankPlace,
    encoder: AudioEncoder | None = None,
) -> Model:
    """The drafting model, without adapters, of which a guess need not know, and in memory, as it is to be fast.
    `encoder`: of the target, where it is the same."""
    revision = config.model.revision if model == config.model.model else None
    options = replace(
        config.model,
        model=model,
        revision=revision,
        quantization=quantization,
        max_model_len=0,
        language_model_only=True,
    )
    parallel = config.parallel if place.comms else ParallelConfig()
    own = replace(
        config,
        model=options,
        lora=LoraConfig(),
        speculation=SpeculationConfig(),
        offload=OffloadConfig(),
        parallel=parallel,
    )
    try:
        return load_model(own, ops, progress, place, encoder=encoder)
    except (ConfigError, ModelError) as error:
        alone = "; --speculative-draft-tensor-parallel-size 1 leaves it to one rank" if place.comms else ""
        raise _error(f"the drafting model: {error.message}{alone}") from None


def _load_heads(config: EngineConfig, asked: Speculation, target: Model, ops: Ops) -> Drafting:
    """Heads, and as many tokens a draft as they give at most."""
    assert asked.model is not None
    try:
        folder = str(resolve(asked.model, hub_beside(config.model)))
        if asked.method == "dflash":
            return _block_drafting(asked, load_dflash(config, folder, asked.num_speculative_tokens, target, ops))
        if asked.method != "medusa":
            eagle = load_eagle(config, folder, asked.method, target, ops)
            return Drafting(asked, eagle.model, keeps=True, heads=eagle)
        heads = load_medusa(folder, target, ops)
    except ModelError as error:
        raise _error(f"the heads: {error.message}") from None
    most = len(heads.heads)
    if asked.tokens > most:
        raise _error(f"num_speculative_tokens {asked.tokens}: {asked.model} has {most} heads")
    return Drafting(replace(asked, num_speculative_tokens=asked.num_speculative_tokens or most), heads=heads)


def _block_drafting(asked: Speculation, heads: DFlash) -> Drafting:
    """Heads that draft as many tokens at once as a block has, less the one that it begins with."""
    tokens = asked.num_speculative_tokens or min(MOST_TOKENS, heads.facts.size - 1)
    return Drafting(
        replace(asked, num_speculative_tokens=tokens), heads.model, keeps=True, heads=heads, block_rows=1 + tokens
    )


def _load_mtp(config: EngineConfig, asked: Speculation, target: Model, ops: Ops, place: RankPlace) -> Drafting:
    """The layer that the model's own files have for it, or the model beside it that reads its keys and values."""
    if asked.model is not None:
        return _load_assistant(config, asked, asked.model, target, ops, place)
    try:
        layer = load_mtp(config, target, ops)
    except ModelError as error:
        raise _error(f"method mtp: {error.message}; use ngram, suffix, draft_model, self") from None
    return Drafting(asked, layer.model, keeps=True, heads=layer)


def _load_assistant(
    config: EngineConfig, asked: Speculation, folder: str, target: Model, ops: Ops, place: RankPlace
) -> Drafting:
    try:
        assistant = load_assistant(config, folder, target, ops, place)
    except (ConfigError, ModelError) as error:
        raise _error(f"method mtp: {folder}: {error.message.removeprefix(f'{folder}: ')}") from None
    rows = 1 if asked.tree is None else asked.nodes
    return Drafting(asked, assistant.model, heads=assistant, block_rows=rows, reads=assistant.sources)


def _first_layers(target: Model, layers: int) -> Model:
    decoder = target.decoder
    assert isinstance(decoder, Decoder), "the table of exclusions says so"
    if layers >= len(decoder.layers):
        raise _error(f"layers {layers} must be fewer than the model's {len(decoder.layers)}")
    if not target.spec.begins(layers):
        near = [str(n) for n in (layers - 1, layers + 1) if 0 < n < len(decoder.layers)]
        raise _error(f"layers {layers} cuts a layer of the files in parts; use {' or '.join(near) or 'another method'}")
    return changed(target, decoder=changed(decoder, layers=decoder.layers[:layers]))


def check_tokens(config: EngineConfig, target: Model, draft: str) -> None:
    """Refuse a draft model whose ids stand for other tokens: every id that both have is compared."""
    folders = tokenizer_folder(config.model, target.folder), resolve(draft, hub_beside(config.model))
    try:
        ours, theirs = (Tokenizer.from_folder(folder).table for folder in folders)
    except ModelError as error:
        raise _error(f"the tokens of both models cannot be compared: {error.message}") from None
    other = next((token for token, i in theirs.items() if ours.get(token, i) != i), None)
    if other is None and len(ours.keys() & theirs.keys()) < min(len(ours), len(theirs)):
        other = next(iter(sorted(theirs.keys() - ours.keys())))
    if other is not None:
        raise _error(f"{draft}: its tokens are not those of {target.name}: {other!r} is another id in one of them")


def _error(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")
