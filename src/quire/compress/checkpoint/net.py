"""A checkpoint as a function of its tensors: the decoder of its family, differentiable in what lies on disk.
See docs/design/workbench.md.

Cutting, un-fusing, the order of rope's rows and stacking are torch functions of the reader that serves the model, so
gradients flow to the tensors as they are named on disk, and a model is written back as the same names with new values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.checkpoint.dequantized import PlainCheckpoint, as_plain_checkpoint
from quire.compress.checkpoint.tensors import CheckpointTensors, CurrentValues
from quire.core.dtypes import F32
from quire.core.errors import ConfigError, ModelError
from quire.core.plan import STORES
from quire.model.batch import Batch
from quire.model.describe import open_model
from quire.model.disk.checkpoint import resolve
from quire.model.disk.headers import ModelHeaders
from quire.model.families.rope import shared_tables, short_reach
from quire.model.load.builders import BLOCKS, load_decoder, load_layer
from quire.model.load.encoder import load_encoder
from quire.model.load.reader import MatrixForm, WeightReader
from quire.model.load.roles import Share
from quire.model.mixers.layer_mixers import mixer_of
from quire.model.net.decoder import Decoder, Layer
from quire.model.net.encoder import Encoder
from quire.model.net.parts import Linear
from quire.model.transformers_backend.detect import borrowed_headers
from quire.ops.arrays import AnyArray, to_torch
from quire.ops.autograd_cache import AutogradCache, held
from quire.ops.differentiable import Differentiable, MatrixSite, Observer, differentiable
from quire.ops.layout import LayerCache, with_states
from quire.ops.lazy import torch_dtype
from quire.ops.recurrent import StateBatch
from quire.quant.base import QWeight

IGNORE_INDEX = -100
"""A target that is none, as in torch's and transformers' losses."""


class _SiteReader(WeightReader):
    """Tells the backend which matrices it packs next. `streams`: as of `Net`."""

    streams = True

    def matrix(
        self, roles: tuple[str, ...], layer: int | None, expert: int | None = None
    ) -> tuple[QWeight, AnyArray | None]:
        """Read a matrix as `WeightReader` does. The table of tokens is one of products where it is the head."""
        self._tell_site(("head",) if roles == ("embed",) else roles, layer)
        return super().matrix(roles, layer, expert)

    def dense(self, role: str, layer: int | None) -> Linear:
        """Read dense numbers as `WeightReader` does."""
        self._tell_site((role,), layer)
        return super().dense(role, layer)

    @contextmanager
    def part(self, layer: int | None = None) -> Iterator[None]:
        """Give memory back as `WeightReader` does; not where the same part is read again at once."""
        if not self.streams:
            yield
            return
        with super().part(layer):
            yield

    def _tell_site(self, roles: tuple[str, ...], layer: int | None) -> None:
        assert isinstance(self.ops, Differentiable)
        self.ops.site = MatrixSite(roles, layer)


def opened_here(model: str) -> ModelHeaders:
    """Headers of `model`; `ModelError` as of `open_model`, and for a model that runs by the code of transformers."""
    found = borrowed_headers(resolve(model))
    if found is not None:
        name = found.spec.family
        raise ModelError(
            f"{found.folder}: {name!r} runs by the code of transformers, whose layers are not known here; serve it "
            "with --quantization int8, or compress a model of docs/models/families.md"
        )
    return open_model(model)


class Net:
    """The decoder of a model, and its encoder if it has one, as functions of `tensors`, in f32.

    `tensors`: by name on disk; a decoder has the values from when it was made. `config`: the fields of config.json,
    without those of a quantization that was undone. Shapes: B sequences of L tokens, hidden widths h, V tokens.
    `streams`: layers are read once, one after the other, so that memory is given back after each.
    """

    streams = True

    def __init__(self, plain: PlainCheckpoint, dtype: torch.dtype) -> None:
        self.tensors = CheckpointTensors(plain.base, dtype)
        self.opened, self.rewritten = plain.over(CurrentValues(self.tensors))
        self.config = plain.config
        self.spec, self.folder, self.name = self.opened.spec, self.opened.folder, self.opened.name
        self.ops = differentiable()
        tables = shared_tables(self.spec.rope, self.spec.max_position)
        self._ropes = {rope: to_torch(table) for rope, table in tables.items()}
        self._watching: list[Callable[[Tensor, Tensor], None]] = []

    @classmethod
    def open(cls, model: str, dtype: torch.dtype = torch.float32) -> Net:
        """Open a folder, GGUF file or hub name as a net; quantized tensors are dequantized, each when it is asked for.

        `dtype`: of floating-point tensors. `ModelError` for what cannot be read, and for models that run by the code of
        transformers, which have no roles.
        """
        opened = opened_here(model)
        if opened.vision is not None:
            raise ModelError(
                f"{opened.folder}: takes images; the workbench reads decoders alone, and would write a model without "
                "its tower. Use --quantization, which leaves the tower as it is"
            )
        return cls(as_plain_checkpoint(opened), dtype)

    def set(self, name: str, tensor: Tensor) -> None:
        """Give the tensor `name` a new value of its shape, which may require gradients. `ModelError` otherwise."""
        self.tensors[name] = tensor

    def require_grad(self, names: bool | Collection[str]) -> dict[str, Tensor]:
        """Make leaves with gradients of the floating-point tensors `names` (True: all); returns them. They are copied.

        `ModelError` for an unknown name.
        """
        if isinstance(names, bool):
            names = [n for n in self.tensors if self.tensors.is_floating_point(n)] if names else []
        for name in names:
            if name not in self.tensors:
                raise ModelError(f"{name} is not a tensor of {self.name}; see `tensors` for their names")
            self.tensors.writable(name).requires_grad_()
        return {name: self.tensors[name] for name in names}

    def decoder(self, requires_grad: bool | Collection[str] = False) -> Decoder:
        """Build the decoder of the current values; tensors that `requires_grad` names become leaves first."""
        self.require_grad(requires_grad)
        return load_decoder(self.reader(), self._ropes)

    def reader(self, share: Share | None = None) -> WeightReader:
        """Return a reader of the current values, in f32."""
        made = _SiteReader(self.opened, self.ops, MatrixForm(F32), share or Share(), None)
        made.streams = self.streams
        return made

    def logits(self, tokens: Tensor, encoded: Tensor | None = None, decoder: Decoder | None = None) -> Tensor:
        """Compute logits f32 [B, L, V] of tokens int [B, L]; `encoded` int [B, E]: what an encoder reads beside each.

        `decoder`: one that was made before, for several calls with the same values. `ConfigError` for more tokens than
        the model has positions, and for an encoder's tokens that are missing or too many.
        """
        rows = torch.arange(tokens.numel(), dtype=torch.int32)
        return self._run(tokens, encoded, decoder, rows).view(*tokens.shape, -1)

    def loss(
        self, tokens: Tensor, targets: Tensor, encoded: Tensor | None = None, decoder: Decoder | None = None
    ) -> Tensor:
        """Compute the mean cross entropy in nats of `targets` int [B, L] (-100: none) under the logits at their places.

        Nothing is shifted: the target of a place is the token after it. `ConfigError` where there is no target.
        """
        rows = (targets.flatten() != IGNORE_INDEX).nonzero()[:, 0].int()
        if not len(rows):
            raise ConfigError(f"every target is {IGNORE_INDEX}: there is nothing to learn from; give one at least")
        return F.cross_entropy(self._run(tokens, encoded, decoder, rows), targets.flatten()[rows].long())

    def _run(self, tokens: Tensor, encoded: Tensor | None, decoder: Decoder | None, rows: Tensor) -> Tensor:
        if (encoded is not None) != self.spec.encoder_decoder:
            raise ConfigError(f"{self.name}: `encoded` is for models with an encoder, which need it")
        self._check_length(tokens.shape[1])
        decoder = self.decoder() if decoder is None else decoder
        own = {i: self._cache(i) for i in self.spec.own_layers}
        caches = [own[self.spec.kv_layer(i)] for i in range(self.spec.layers)]
        if encoded is None:
            alone: Tensor = decoder(self._turned(flat_batch(tokens, rows)), caches)
            return alone
        encoder, width = self.encoder(decoder), tokens.shape[1] + encoded.shape[1]
        for s, row in enumerate(encoded):
            encoder(row.int(), torch.arange(len(row)) + s * width, caches)
        both: Tensor = decoder(encoder_batch(tokens, encoded.shape[1], rows), caches)
        return both

    def encoder(self, decoder: Decoder) -> Encoder:
        """Build the encoder beside `decoder`, for models that have one."""
        return load_encoder(self.reader(), decoder.embed, self._ropes[self.spec.rope[0]])

    def _check_length(self, longest: int) -> None:
        if longest > self.spec.max_position:
            most = self.spec.max_position
            raise ConfigError(f"{self.name} has {most} positions, {longest} tokens were given; cut the text")

    def _turned(self, batch: Batch) -> Batch:
        """`batch` with positions of sequences that turn as short ones where the rope tables have these."""
        longest = self.spec.max_position
        short = short_reach(self.spec.rope, longest)
        if not short:
            return batch
        shifts = torch.where(batch.context <= short, longest, 0).repeat_interleave(batch.context)
        return replace(batch, positions=batch.positions + shifts.int())

    def _cache(self, layer: int) -> LayerCache:
        mixer = mixer_of(self.spec, layer)
        cache = tuple(map(AutogradCache.of, mixer.parts(1, F32)))
        return cache if mixer.state is None else with_states(cache, torch.zeros(mixer.state.shape(1)))

    def before_layers(self) -> Decoder:
        """Build what `enter` runs, of the current values: the embedding table and what follows it."""
        return load_decoder(self.reader(Share(layers=range(0))), self._ropes)

    def after_layers(self) -> Decoder:
        """Build what `leave` runs, of the current values: the last norm and the head."""
        return load_decoder(self.reader(Share(layers=range(self.spec.layers, self.spec.layers))), self._ropes)

    def enter(self, tokens: Tensor, part: Decoder | None = None, lengths: Tensor | None = None) -> Tensor:
        """Compute the hidden states before the first layer, f32 [B, L, h], of tokens int [B, L].

        `part`: what `before_layers` returned, for several calls. `lengths` int [S]: lengths of sequences that lie one
        after the other, with B = 1 and L their sum; None: B sequences of length L.
        """
        self._check_length(tokens.shape[1] if lengths is None else int(lengths.max()))
        part = self.before_layers() if part is None else part
        found: Tensor = part.enter(self._turned(_batch(tokens, lengths)))
        return found.view(*tokens.shape, -1)

    def reads(self, index: int) -> str:
        """Name what makes or chooses something that layer `index` reads beside the stream: an encoder, another layer or
        a table.

        "" where nothing does, so that the layer runs by itself.
        """
        other = self.spec.kv_layer(self.spec.mla.indexer.source(index))
        if self.spec.inputs.width:
            return "the table of per-layer embeddings"
        if self.spec.streams.turns.stack:
            return "the other stack"
        if self.spec.moe.late:
            return "experts of another layer"
        return "an encoder" if self.spec.encoder_decoder else f"layer {other}" if other != index else ""

    def layer(self, index: int) -> Layer:
        """Build layer `index` of the current values; the weights of no other layer are read.

        `ModelError` where it reads what another made, an earlier layer or an encoder: such models run as a whole.
        """
        if found := self.reads(index):
            raise ModelError(f"{self.name}: layer {index} reads what {found} made; run the model as a whole")
        reader = self.reader()
        with reader.part(index):
            return reader.place(load_layer(reader, index, self._ropes[self.spec.rope[index]], None))

    def run_layer(
        self,
        index: int,
        x: Tensor,
        delta: Tensor | None,
        layer: Layer | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run layer `index`, and return the hidden states and the residual that is to be added to them.

        x f32 [B, L, h]: hidden states; delta [B, L, h]: the residual, None before the first layer. `layer`: what
        `layer(index)` returned, for several calls. `lengths`: as of `enter`.
        """
        layer = self.layer(index) if layer is None else layer
        ops, rows, shape = self.ops, x.flatten(0, 1), x.shape
        if delta is None:
            h = layer.attn_norm(ops, rows)
        else:
            rows, h = layer.attn_norm.add(ops, rows, delta.flatten(0, 1))
        batch = self._turned(_batch(torch.zeros(shape[:2], dtype=torch.int32), lengths))
        cache = self._cache(index)
        rows, added = BLOCKS[self.spec.join](ops, layer, rows, h, batch, cache, None)
        for watching in self._watching if cache else ():
            watching(*held(cache[0]).rows()[1:])
        return rows.view(shape), added.view(shape)

    def leave(self, x: Tensor, delta: Tensor, part: Decoder | None = None) -> Tensor:
        """Compute logits f32 [B, L, V] of what the last layer returned: x and delta, f32 [B, L, h].

        `part`: what `after_layers` returned, for several calls.
        """
        part = self.after_layers() if part is None else part
        batch = flat_batch(torch.zeros(x.shape[:2], dtype=torch.int32))
        found: Tensor = part.leave(x.flatten(0, 1), delta.flatten(0, 1), batch, None)
        return found.view(*x.shape[:2], -1)

    @contextmanager
    def observe(self, callback: Observer) -> Iterator[None]:
        """While the context is open, call `callback(role, layer, expert, x [T, k] f32)` with the input of each matrix
        product.

        Matrices that lie fused (q, k and v; gate and up) are named one after the other with the same rows. `expert` is
        None but for experts, which see their own rows. Latents are the input of "kv_b". A head that shares the
        embedding table is "head".
        """
        self.ops.observers.append(callback)
        try:
            yield
        finally:
            self.ops.observers.remove(callback)

    @contextmanager
    def watch_cache(self, callback: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
        """While the context is open, call `callback(keys, values)`, f32 [T, kv heads, head] each, with what `run_layer`
        caches."""
        self._watching.append(callback)
        try:
            yield
        finally:
            self._watching.remove(callback)


def checkpoint_dtype(net: Net) -> torch.dtype:
    """Return the dtype in which most of a model's numbers were read, and in which they are written."""
    found: torch.dtype = torch_dtype(net.opened.dtype)
    return found


def flat_batch(tokens: Tensor, rows: Tensor | None = None) -> Batch:
    """Build a batch of whole sequences of tokens int [B, L] over `AutogradCache` caches.

    `rows` int32: those that want logits; None: all.
    """
    count, length = tokens.shape
    return packed_batch(tokens.flatten(), torch.full((count,), length), rows)


def packed_batch(tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> Batch:
    """Build a batch of sequences of `lengths` int [S], whose tokens int [T] lie one after the other."""
    slots, ends = torch.arange(len(tokens)), lengths.cumsum(0)
    begins = ends - lengths
    places = torch.arange(int(lengths.max()))
    return Batch(
        tokens=tokens.int(),
        positions=(slots - begins.repeat_interleave(lengths)).int(),
        slots=slots,
        cu_q=F.pad(ends, (1, 0)).int(),
        context=lengths.int(),
        block_tables=(begins[:, None] + places).int(),
        logit_rows=slots.int() if rows is None else rows,
        states=whole_sequences(F.pad(ends, (1, 0)).int()),
    )


def whole_sequences(cu_q: Tensor) -> StateBatch:
    """Recurrent states of sequences that begin here, and whose states nobody reads."""
    count = len(cu_q) - 1
    none = torch.full((count, STORES), -1, dtype=torch.int32)
    return StateBatch(cu_q, none[:, 0].contiguous(), torch.zeros_like(none), none)


def _batch(tokens: Tensor, lengths: Tensor | None) -> Batch:
    return flat_batch(tokens) if lengths is None else packed_batch(tokens.flatten(), lengths)


def encoder_batch(tokens: Tensor, encoded: int, rows: Tensor) -> Batch:
    """Build a batch as `flat_batch` does, with slots of an encoder's `encoded` tokens before those of each sequence."""
    own, (count, length) = flat_batch(tokens, rows), tokens.shape
    slots = torch.arange(count * (encoded + length)).view(count, -1)
    total = count * length
    cross = Batch(
        tokens=own.tokens, positions=own.positions, slots=own.slots, logit_rows=own.logit_rows,
        cu_q=torch.arange(total + 1, dtype=torch.int32),
        context=torch.full((total,), encoded, dtype=torch.int32),
        block_tables=slots[:, :encoded].int().repeat_interleave(length, 0),
    )  # fmt: skip
    return Batch(
        tokens=own.tokens, positions=own.positions, slots=slots[:, encoded:].flatten(), cu_q=own.cu_q,
        context=own.context, block_tables=slots[:, encoded:].int(), logit_rows=own.logit_rows, cross=cross,
    )  # fmt: skip
