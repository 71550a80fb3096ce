"""Numbers of the kernels that are chosen by measurement: parsing, keeping, and that no result depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from op_cases import reference as cases
from over_torch import select
from quire.core.config import DeviceConfig
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.ops.kinds import SUPER_KINDS
from quire.ops.native import load_native
from quire.ops.tuning import FILE, NEVER, Tuning, keep, parse, recall
from quire.run import kernel_tuning

FORMATS = (("int8", 32), ("int8", 128), ("int4", 32), ("int4", 64), ("int4", 128), ("bf16", 0))
SUPER_FORMS = {kind: form for form, kind in SUPER_KINDS.items()}
native = load_native()
UNITS = native.units() if native else []
needs_native = pytest.mark.skipif(native is None, reason="the native extension is not built")


def test_what_tune_pins() -> None:
    assert parse("auto") is None
    assert parse("off") == Tuning()
    assert parse("ahead=1024,row_streams=4") == Tuning(1024, 12, 4)
    assert parse(str(Tuning(1, 2, 4))) == Tuning(1, 2, 4)


@pytest.mark.parametrize(
    "text", ["", "fast", "ahead", "ahead=x", "width=3", "ahead=-1", "tile_rows=0", "ahead=9999999", "row_streams=3"]
)
def test_a_wrong_tune_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--tune"):
        parse(text)


def test_choices_are_kept_beside_each_other(tmp_path: Path) -> None:
    assert recall("a", tmp_path) is None
    keep("a", Tuning(1), tmp_path)
    keep("b", Tuning(2), tmp_path)
    assert (recall("a", tmp_path), recall("b", tmp_path)) == (Tuning(1), Tuning(2))
    (tmp_path / FILE).write_bytes(b"{")
    assert recall("a", tmp_path) is None
    keep("a", Tuning(3), tmp_path)
    assert recall("a", tmp_path) == Tuning(3)


@needs_native
@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind,group", (*FORMATS, *((kind, 0) for kind in SUPER_FORMS)))
def test_results_do_not_depend_on_the_choice(kind: str, group: int, isa: str) -> None:
    ops = select(DeviceConfig(device="cpu", isa=isa))
    generator = torch.Generator().manual_seed(1)
    # 216 rows: blocks that read side by side are fewer at the end, and the last of them is not whole
    if kind in SUPER_FORMS:
        weight = ops.pack(cases.super_weight(generator, SUPER_FORMS[kind], 216, 512))
    else:
        weight = ops.pack(cases.random_weight(generator, kind, 216, 512, group or 32))
    rows = cases.normal(generator, 17, 512)
    try:
        for count in (1, 3, 7, 13, 16, 17):
            found = []
            for tuning in (Tuning(), Tuning(0, 1, 4), Tuning(1024, 100, 2), Tuning(1 << 20, 5, 1)):
                ops.cpu.native.set_tuning(tuning)
                ops.begin_step()
                found.append(ops.linear(rows[:count].contiguous(), weight, None).clone())
            assert all(torch.equal(found[0], other) for other in found[1:]), count
    finally:
        ops.cpu.native.set_tuning(Tuning())


class Counted:
    """Counts the settings that are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[Tuning] = []
        keep = kernel_tuning.keep
        monkeypatch.setattr(kernel_tuning, "keep", lambda key, tuning: (self.kept.append(tuning), keep(key, tuning)))


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A machine on which nothing was measured, and no model is too small to."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(kernel_tuning, "SMALLEST", 0)
    monkeypatch.setattr(kernel_tuning, "BUDGET", 0.05)
    return Counted(monkeypatch)


def text(tokens: int, seqs: int = 64, **options: str) -> str:
    """What the embedded model says."""
    with LLM(device="cpu", num_blocks=64, max_num_seqs=seqs, **options) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return llm.generate(["import os"], params)[0].outputs[0].text


@needs_native
def test_the_first_tokens_are_measured_and_the_next_start_remembers(tmp_path: Path, fresh: Counted) -> None:
    if select(DeviceConfig(device="cpu")).isa == "amx":
        pytest.skip("made-up steps are measured there")
    plain, few = text(50, tune="off"), len(kernel_tuning.STREAMING) * kernel_tuning.TURNS + 1
    assert text(few, tune="auto") == text(few, tune="off") and not fresh.kept, "a token comes from the prompt's step"
    assert text(50, tune="auto") == plain and len(fresh.kept) == 1
    assert (tmp_path / ".cache" / "quire" / FILE).exists()
    assert text(50, tune="auto") == plain and len(fresh.kept) == 1


@needs_native
@pytest.mark.parametrize("seqs", [64, 3])
def test_made_up_steps_choose_where_batches_matter(fresh: Counted, seqs: int) -> None:
    """As with tile registers; elsewhere their number of rows does nothing."""
    with LLM(device="cpu", tune="off", num_blocks=64, max_num_seqs=seqs) as llm:
        step = llm.engine.engine.runner.step  # type: ignore[attr-defined]
        chosen = kernel_tuning._measure(step)
        assert chosen.ahead in {ahead for ahead, _ in kernel_tuning.STREAMING} and chosen.tile_rows in {
            *kernel_tuning.BATCHES,
            NEVER,
        }
        params = SamplingParams(max_tokens=8, temperature=0.0)
        said = llm.generate(["import os"], params)[0].outputs[0].text
    assert said == text(8, seqs, tune="off"), "nothing of the made-up steps is left"
