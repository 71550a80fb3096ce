"""The calibration of this machine for plans: recalled from the cache folder, or what lacks of it measured now."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from quire.core.config import DeviceConfig, EngineConfig
from quire.core.errors import ConfigError
from quire.ops.choice import choose
from quire.plan.devices import DeviceSheet
from quire.plan.memory import choice_of, facts_of, kv_format, rank_needs
from quire.plan.predict import Machine
from quire.plan.rates import Calibration, machine_key, recall


def machine_of(
    config: EngineConfig,
    device: DeviceSheet | None,
    fresh: bool = False,
    beside: tuple[str, ...] = (),
    before_part: Callable[[], None] = lambda: None,
) -> Machine:
    """Where `config` is to run: a named GPU, or this machine, calibrated for what the config needs, and for the formats
    `beside`, which advice compares.

    The first time takes some 10 s and a format, a minute where the largest cache is hundreds of MiB; `fresh` measures
    again. `before_part` is called before each part of that, and ends it by an exception; what was measured is kept.
    `ConfigError` where nothing can be calibrated.
    """
    if device is not None:
        return Machine(device)
    found, _ = facts_of(config)
    choice = choice_of(config, None)
    if choice.backend != "cpu":
        raise ConfigError(
            f"--device this: step times are calibrated for the CPU's kernels, and {choice.backend} runs here; name the "
            "GPU, or ask for --device cpu",
            param="device",
        )
    kinds = {part.kind for rank in rank_needs(config, found, choice) for part in rank.parts if part.product}
    kinds |= {kind if kind == "bf16" else f"{kind} g{config.model.group_size}" for kind in beside}
    return Machine(None, calibration(config.device, kinds, kv_format(config, found, choice).name, fresh, before_part))


def calibration(
    device: DeviceConfig,
    kinds: Collection[str],
    kv: str,
    fresh: bool = False,
    before_part: Callable[[], None] = lambda: None,
) -> Calibration:
    """Calibration of this machine, with rates of at least `kinds` and of attention over keys and values in `kv`.

    Only what is not known yet is measured; `before_part` is called before each part of that.
    """
    choice = choose(device)
    key = machine_key(choice.isa, choice.threads)
    found = None if fresh else recall(key)
    wanted = {kind for kind in kinds if measurable(kind)} or {"bf16"}
    lacking = wanted if found is None else wanted - set(found.kinds)
    if found is not None and not lacking and kv in found.attention:
        return found
    from quire.bench.calibrating import measured

    return measured(device, key, found, lacking, kv, before_part)


def measurable(kind: str) -> bool:
    """Whether matrices of the kind can be made up: others count as one of as many bits."""
    return kind in ("bf16", "bf12", "f32") or re.fullmatch(r"(int8|int4|table4) g(32|64|128)", kind) is not None
