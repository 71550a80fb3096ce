"""Drafts behind an encoder: what the draft model reads of a prompt, by its own encoder or by that of its target.

Gandhi et al. 2023, "Distil-Whisper": a distilled model keeps the encoder of its teacher, frozen, so that one pass of it
serves both decoders, and the smaller one drafts for the larger.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

import numpy as np

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.plan import ChunkResult, StepPlan
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.model.build import Model
from quire.model.describe import open_model
from quire.model.disk.headers import ModelHeaders
from quire.model.net.audio_encoder import AudioEncoder
from quire.model.spec import ModelSpec
from quire.ops.arrays import AnyArray, as_f32, to_numpy
from quire.run.step import ModelStep
from quire.speculate.drafter import ModelDrafter
from quire.store.hub import hub_beside

ENCODER = "encoder_"
"""What the roles of an encoder's tensors begin with."""


class EncodedDrafter(ModelDrafter):
    """A model behind an encoder, whose keys and values of the prompt are made when the target's are.

    They lie in the draft model's layers of the same slots. So its decoder catches up with the decoder's part alone.
    """

    def __init__(self, step: ModelStep, vocab_size: int, weight_bytes: int, form: TreeForm | None) -> None:
        super().__init__(step, vocab_size, weight_bytes, form)
        spec = step.model.spec
        if spec.encoder.rows:  # all parts of an encoder are as long, and positions are counted behind them
            lead = -(-spec.encoder.rows // self._size) * self._size
            self.longest = min(self.longest, lead + spec.max_position)

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """Encode the prompts that the target encoded; those of one token alone are not drafted for."""
        super().computed(plan, False)
        for chunk in plan.chunks:
            seq = chunk.seq
            if chunk.start < seq.encoder.tokens and seq.draft.enabled and seq.limit > seq.prompt_len + 1:
                self._step.encode(*self._builder.encoded(seq))
                self._through[seq.kv.blocks[0][: seq.encoder.lead // self._size]] = self._size

    def ready(self, seq: Sequence) -> bool:
        """Whether its prompt is encoded."""
        return bool(seq.kv.blocks) and self._first(seq) >= seq.encoder.lead


def check_encoders(target: Model, draft: Model, folder: str) -> None:
    """`ConfigError` unless both models have an encoder that reads the same, or neither has one."""
    ours, theirs = target.spec.encoder, draft.spec.encoder
    if target.spec.encoder_decoder != draft.spec.encoder_decoder:
        has, lacks = (target.name, folder) if target.spec.encoder_decoder else (folder, target.name)
        raise _error(f"{folder}: {has} has an encoder, and {lacks} has none; choose a draft model of the same kind")
    if (ours.rows, ours.bins) != (theirs.rows, theirs.bins):
        raise _error(
            f"{folder}: its encoder makes {theirs.rows} rows of frames of {theirs.bins} numbers, that of {target.name} "
            f"{ours.rows} of {ours.bins}: both must hear the same; choose another draft model"
        )


def shared_encoder(config: EngineConfig, target: Model, draft: str) -> AudioEncoder | None:
    """The encoder of `target` where the files of the model `draft` hold the same numbers for theirs, else None."""
    encoder = target.encoder
    if not isinstance(encoder, AudioEncoder):
        return None
    options = config.model
    ours, theirs = (
        open_model(model, options.load_format, options.seed, hub_beside(options))
        for model in (str(target.folder), draft)
    )
    if _facts(ours.spec) != _facts(theirs.spec) or ours.quantized or theirs.quantized:
        return None
    try:
        return encoder if _same_encoder(ours, theirs) else None
    finally:
        ours.source.give_back()
        theirs.source.give_back()


def _facts(spec: ModelSpec) -> tuple[object, ...]:
    """What an encoder's output depends on beside its weights."""
    stack = spec.encoder
    return stack.layers, stack.rows, stack.bins, spec.hidden, spec.heads, spec.head_dim, spec.activation, spec.norm_eps


def _same_encoder(ours: ModelHeaders, theirs: ModelHeaders) -> bool:
    """Whether every tensor of both encoders has the same numbers, of whatever dtype."""
    own, other = (
        {at: parts for at, parts in each.claim.parts.items() if at[0].startswith(ENCODER)} for each in (ours, theirs)
    )
    if {at: parts.keys() for at, parts in own.items()} != {at: parts.keys() for at, parts in other.items()}:
        return False
    names = ((name, other[at][part]) for at, parts in own.items() for part, name in parts.items())
    return all(_equal(ours.source.tensor(mine), theirs.source.tensor(its)) for mine, its in names)


def _equal(a: AnyArray, b: AnyArray) -> bool:
    return np.array_equal(to_numpy(as_f32(a)), to_numpy(as_f32(b)))


def _error(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")
