"""What is asked of speculative decoding, in the keys of vLLM's `speculative_config`."""

from __future__ import annotations

from ast import literal_eval
from typing import Any, NamedTuple

import msgspec

from quire.core.errors import ConfigError
from quire.core.exclusions.features import (
    DFLASH,
    DRAFT_MODEL,
    DRAFTS,
    EAGLE,
    EAGLE3,
    MEDUSA,
    MTP,
    SELF_LAYERS,
    SELF_QUANTIZED,
    TREES,
    Feature,
    found,
)

METHODS = ("ngram", "suffix", "draft_model", "self", "mtp", "medusa", "eagle", "eagle3", "dflash")
WITH_MODEL = ("draft_model", "medusa", "eagle", "eagle3", "dflash")
"""Methods that `model` names a folder for."""
MAY_HAVE_MODEL = ("mtp",)
"""Methods that `model` may name a folder for; without it the model's own files have what drafts."""
LOOK_UPS = ("ngram", "suffix")
"""Those that no model drafts for."""
HEADS = ("medusa", "eagle", "eagle3", "dflash")
"""Those whose folder holds heads of the target, not a model."""
MOST_TOKENS = 32
"""Drafted tokens of a sequence and step one after the other."""
MOST_NODES = 63
"""Drafted tokens of a sequence and step in all, where they branch: a row's ancestors are bits of a word."""
DEFAULT_TOKENS = {
    "ngram": 8,
    "suffix": 24,
    "draft_model": 5,
    "self": 5,
    "mtp": 3,
    "medusa": 0,
    "eagle": 4,
    "eagle3": 4,
    "dflash": 0,
}
"""Drafted tokens where nothing is said; 0: as many as the folder was trained for."""
UNBRANCHED = ("dflash",)
"""Those that say all tokens of a draft at once, so that none follows from another."""
NONE = "none"
"""In the place of a method: nothing drafts, though the model's files have a layer for it."""
OWN_LAYER = '{"method":"mtp"}'
"""What is asked for where nothing was, of models whose files have a layer that drafts."""


class TreeForm(NamedTuple):
    """Bounds of drafts that branch: most tokens one after the other, most after one token, most in all.

    `paths`: which of the likeliest is taken at each depth, for every token; None where the likeliest of all are.
    """

    depth: int
    topk: int
    nodes: int
    paths: frozenset[tuple[int, ...]] | None = None


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are guessed ahead. What comes out does not depend on any of it.

    `num_speculative_tokens`: most drafted tokens of a sequence and step. `prompt_lookup_min`, `prompt_lookup_max`: how
    many last tokens must be found earlier, and how many are compared (ngram, suffix). `model`: the folder of the draft
    model, or of heads (medusa, eagle, eagle3, dflash), and `quantization` what a model's 16-bit weights become; with
    `self` it is the same checkpoint, of which only the first `layers` run if that is not 0. With `mtp` it is a layer of
    the model's own files that was trained for it, or the folder of an assistant, which reads the model's keys and
    values. `adaptive`: each step drafts as many as pay; otherwise always all.

    `suffix` finds them in earlier outputs too, as vLLM's keys say: the longest run that is compared, of how many
    sequences the outputs are remembered (0: none), how many tokens are guessed for each token of the run, and how
    likely a token must be, by how often it followed.

    `draft_tensor_parallel_size`: ranks that a draft model is split over, 1 or the target's (0: those).

    Drafts branch where `topk` is more than 1: so many tokens are tried after each of the `topk` likeliest of a depth,
    and the `num_draft_tokens` likeliest of all are verified (EAGLE-2, Li et al. 2024; the names are SGLang's). Or they
    branch as `speculative_token_tree` says (vLLM's): [[0], [1], [0, 0]] are the two likeliest tokens, and the
    likeliest after the first of them.
    """

    method: str = ""
    model: str | None = None
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 16
    quantization: str | None = None
    layers: int = 0
    topk: int = 1
    num_draft_tokens: int = 0
    speculative_token_tree: str | list[list[int]] | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    adaptive: bool = True
    draft_tensor_parallel_size: int = 0

    @property
    def everywhere(self) -> bool:
        """Whether every rank computes what drafts, not the first alone: what it reads of the target is split.

        A draft model is, unless one rank was asked for.
        """
        return self.method in ("self", "mtp", "eagle", "eagle3") or (
            self.method == "draft_model" and self.draft_tensor_parallel_size != 1
        )

    @property
    def features(self) -> frozenset[Feature]:
        """What is asked for, as far as it excludes something."""
        method = self.method
        return found(
            (DRAFTS, True),
            (DRAFT_MODEL, method == "draft_model"),
            (MEDUSA, method == "medusa"),
            (EAGLE, method == "eagle"),
            (EAGLE3, method == "eagle3"),
            (DFLASH, method == "dflash"),
            (MTP, method == "mtp"),
            (SELF_LAYERS, method == "self" and self.layers > 0),
            (SELF_QUANTIZED, method == "self" and not self.layers),
            (TREES, self.tree is not None),
        )

    @property
    def tokens(self) -> int:
        """Most drafted tokens of a sequence and step."""
        if self.speculative_token_tree is not None:
            return max(map(len, _paths(self.speculative_token_tree)))
        return self.num_speculative_tokens or DEFAULT_TOKENS[self.method]

    @property
    def tree(self) -> TreeForm | None:
        """How drafts branch, or None: they do not."""
        if self.speculative_token_tree is not None:
            paths = tuple(sorted(map(tuple, _paths(self.speculative_token_tree)), key=lambda path: (len(path), path)))
            return TreeForm(self.tokens, max(map(max, paths)) + 1, len(paths), frozenset(paths))
        if self.topk == 1:
            return None
        most = self.num_draft_tokens or min(MOST_NODES, self.topk * self.tokens)
        return TreeForm(self.tokens, self.topk, most)

    @property
    def nodes(self) -> int:
        """Most drafted tokens of a sequence and step in all."""
        return self.tokens if self.tree is None else self.tree.nodes


def parse_speculation(config: str | None, model: str | None, tokens: int | None, ranks: int = 0) -> Speculation | None:
    """Parse `speculative_config` as JSON, or the options of older calls; None where nothing is asked for, or `NONE`.

    `ConfigError` naming the key that is wrong.
    """
    if config is not None and (model or tokens or ranks):
        raise _error("gives the model, the number of tokens and its ranks too: leave out the other options")
    given: dict[str, Any] = {"model": model, "num_speculative_tokens": tokens or 0, "draft_tensor_parallel_size": ranks}
    if config is not None:
        try:
            given = msgspec.json.decode(config, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise _error(f"{config!r} is not a JSON object: {error}") from None
    elif model is None:
        if tokens or ranks > 1:
            name = "num_speculative_tokens" if tokens else "speculative_draft_tensor_parallel_size"
            raise _error(f'{name} alone does not say who drafts; for example: {{"method": "ngram"}}')
        return None
    if given.get("model") in ("[ngram]", "ngram"):  # vLLM before 0.6.4 spelled it so
        given |= {"method": "ngram", "model": None}
    given = {key: value for key, value in given.items() if value is not None}
    if given == {"method": NONE}:
        return None
    given.setdefault("method", "draft_model" if "model" in given else "")
    try:
        asked = msgspec.convert(given, Speculation)
    except msgspec.ValidationError as error:
        known = ", ".join(Speculation.__struct_fields__)
        raise _error(f"{error}; known keys are {known}") from None
    _check(asked)
    return asked


def _check(asked: Speculation) -> None:
    if asked.method not in METHODS:
        alone = "; none stands alone" if asked.method == NONE else ""
        raise _error(f"method {asked.method!r} is not one of {', '.join(METHODS)}{alone}")
    if not 0 <= asked.num_speculative_tokens <= MOST_TOKENS:
        raise _error(f"num_speculative_tokens {asked.num_speculative_tokens} must lie in [1, {MOST_TOKENS}]")
    if not 1 <= asked.prompt_lookup_min <= asked.prompt_lookup_max <= 256:
        raise _error("1 <= prompt_lookup_min <= prompt_lookup_max <= 256 must hold")
    if asked.method not in MAY_HAVE_MODEL and (asked.method in WITH_MODEL) != (asked.model is not None):
        raise _error(
            f"model names the folder of what drafts: each of {', '.join(WITH_MODEL)} needs it, "
            f"{', '.join(MAY_HAVE_MODEL)} may have it, and no other takes it"
        )
    if asked.method == "self" and (asked.quantization is None) == (asked.layers == 0):
        raise _error("method self needs quantization (the same checkpoint at fewer bits) or layers (its first ones)")
    if asked.layers and asked.method != "self":
        raise _error("layers needs method self")
    if asked.quantization is not None and asked.method in (*LOOK_UPS, *HEADS, "mtp"):
        raise _error("quantization needs a model that drafts; heads stay in the bits of the target's 16-bit weights")
    if asked.method in UNBRANCHED and (asked.topk > 1 or asked.speculative_token_tree is not None):
        raise _error(f"drafts of the method {asked.method!r} do not branch; leave out topk and speculative_token_tree")
    if not 1 <= asked.topk <= 16:
        raise _error(f"topk {asked.topk} must lie in [1, 16]")
    if asked.num_draft_tokens and (asked.topk == 1 or not 1 <= asked.num_draft_tokens <= MOST_NODES):
        raise _error(f"num_draft_tokens is at most {MOST_NODES}, and of drafts that branch: topk must be more than 1")
    if asked.speculative_token_tree is not None:
        _check_tree(asked)
    if asked.suffix_decoding_max_tree_depth < 1 or asked.suffix_decoding_max_cached_requests < 0:
        raise _error("suffix_decoding_max_tree_depth must be at least 1, suffix_decoding_max_cached_requests 0")
    if asked.suffix_decoding_max_spec_factor <= 0 or not 0 <= asked.suffix_decoding_min_token_prob <= 1:
        raise _error("suffix_decoding_max_spec_factor must be above 0, suffix_decoding_min_token_prob within [0, 1]")
    if asked.layers < 0:
        raise _error("layers must not be negative")


def _paths(tree: str | list[list[int]]) -> list[list[int]]:
    """The static tree, which vLLM spells as Python does."""
    return [list(path) for path in literal_eval(tree)] if isinstance(tree, str) else tree


def _check_tree(asked: Speculation) -> None:
    """Every path goes on from one that is there."""
    assert asked.speculative_token_tree is not None
    try:
        paths = {tuple(path) for path in _paths(asked.speculative_token_tree)}
        good = paths and all(type(rank) is int and 0 <= rank < 16 for path in paths for rank in path)
    except (ValueError, SyntaxError, TypeError):
        good = False
    if not good or any(not path or (len(path) > 1 and path[:-1] not in paths) for path in paths):
        raise _error('speculative_token_tree must be like "[(0,), (1,), (0, 0)]", each path going on from another')
    if asked.method in LOOK_UPS:
        raise _error("speculative_token_tree is of models; with look-ups topk says how many continuations are tried")
    if len(paths) > MOST_NODES or asked.topk != 1:
        raise _error(f"speculative_token_tree has at most {MOST_NODES} tokens, and no topk beside it")
    depth = max(map(len, paths))
    if asked.num_speculative_tokens not in (0, depth):
        raise _error(f"speculative_token_tree is {depth} deep, num_speculative_tokens {asked.num_speculative_tokens}")


def _error(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")
