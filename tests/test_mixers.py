"""Facts of mixers: the cache planned from them is the one that is allocated; refusals name the row of the table."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import quire
from oracle import BACKENDS, backend
from quire.cache.groups import LayerGroups, group_layers
from quire.core.dtypes import BF16, F8, F16, F32, I8, Dtype
from quire.core.errors import ConfigError
from quire.core.exclusions.features import ENCODER, LATENTS
from quire.model.families.rope import NO_ROPE
from quire.model.load.builders import MIXERS
from quire.model.load.roles import ROLES
from quire.model.mixers import attention, cross, latent
from quire.model.mixers.attention import Attention
from quire.model.mixers.cross import EncoderDecoderAttention
from quire.model.mixers.latent import Latents
from quire.model.mixers.mixer import Mixer
from quire.model.mixers.table import kept_parts, layouts_of
from quire.model.spec import MLA, ModelSpec
from quire.ops.arrays import to_numpy

SHAPES: list[Mixer] = [
    Attention(8, 2, 64),
    Attention(4, 4, 16),
    EncoderDecoderAttention(4, 4, 16),
    Latents(4, 48, 0, 32, 16),
    Latents(8, 192, 64, 512, 64),
]
OWNERS = ("mixers/", "families/", "load/latent.py", "spec.py")
"""Files under model/ that may look at the sizes of latent attention."""


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mixer", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, I8, F8], ids=str)
def test_a_cache_takes_what_its_mixer_says(mixer: Mixer, dtype: Dtype, name: str) -> None:
    if dtype in (I8, F8) and not mixer.scaled:
        pytest.skip("it keeps no codes")
    ops = backend(name)
    layout = mixer.layout(16, dtype, ops.layout)
    cache = ops.allocate_cache(layout, 3)
    taken = sum(to_numpy(part).nbytes for part in (cache.keys, cache.values))
    assert taken == 3 * 16 * layout.bytes_per_token == 3 * 16 * mixer.layout(1, dtype).bytes_per_token


def test_formats_of_a_cache() -> None:
    heads, latents = SHAPES[0], SHAPES[3]
    assert [heads.kept_in(asked, BF16, "cpu") for asked in ("auto", "int8", "fp8")] == [BF16, I8, F8]
    assert [latents.kept_in("auto", dtype, "cpu") for dtype in (BF16, F32, F16)] == [BF16, F32, F32]
    assert latents.kept_in("auto", F16, "triton") == F16
    for asked in ("int8", "fp8", "float16"):
        with pytest.raises(ConfigError, match="latents are kept in bf16 or f32"):
            latents.kept_in(asked, BF16, "cpu")


def test_what_a_mixer_allows() -> None:
    assert LATENTS in SHAPES[3].features and ENCODER in SHAPES[2].features and not SHAPES[0].features
    assert all(mixer.own_heads == isinstance(mixer, Attention) for mixer in SHAPES)
    assert set(MIXERS) == {type(mixer) for mixer in SHAPES}, "each kind can be loaded"


def test_only_its_own_files_look_at_the_sizes_of_latent_attention() -> None:
    root = Path(quire.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in root.rglob("*.py")
        if not str(path.relative_to(root / "model") if path.is_relative_to(root / "model") else path).startswith(OWNERS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "rank" and ast.unparse(node.value).endswith("mla")
    ]
    assert not found, found


def test_roles_of_mixers_are_those_of_a_checkpoint() -> None:
    kinds = (attention.ROLES, cross.ROLES, latent.ROLES)
    names = [name for roles in kinds for name in roles]
    assert len(names) == len(set(names)) and set(names) < set(ROLES), "each is one kind's"
    assert all(ROLES[name] is roles[name] for roles in kinds for name in roles)


def test_a_windowed_model_beside_one_of_latents() -> None:
    spec = ModelSpec("", 2, 64, 4, 2, 16, 128, 100, 1e-6, "silu", (NO_ROPE,) * 2, (32, 0), 0.25, False, 256)
    small = replace(spec, mla=MLA(rank=32, rope=8, nope=8, value=16), windows=(0, 0))
    layouts = [layouts_of(each, "auto", BF16, "cpu", 16) for each in (small, spec)]
    parts = kept_parts([(small, layouts[0]), (spec, layouts[1])])
    assert [part.window for part in parts.values()] == [0, 0, 32, 0]
    assert group_layers(parts, 256) == LayerGroups((0,), ((0, 1, 2, 3),)), "latents lie in blocks of their own"
    heads = {layer: part for layer, part in parts.items() if part.strided}
    assert group_layers(heads, 256).windows == (0, 32)
