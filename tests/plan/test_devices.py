"""Devices of `quire plan`: the table, own ones, and which is the cheapest for a load."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from command_line import Run
from command_line import run as run
from planned_models import LLAMA_7B, written
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.plan.compare import compare_devices, offer_of
from quire.plan.devices import DEVICES, KINDS, device_of, devices_named, own_device, with_prices
from quire.plan.planned_load import PlannedLoad, Slo
from quire.plan.predict import Machine, Planner

LOAD = PlannedLoad(rate=0.5, input=256, output=64)


def test_every_row_of_the_table_is_whole() -> None:
    assert len(DEVICES) > 50 and {device.kind for device in DEVICES.values()} == set(KINDS)
    for device in DEVICES.values():
        assert device.source and 4e9 < device.memory < 1e12 and 5e10 < device.bandwidth < 1e13, device.name
        assert 1e12 <= device.peak(16) <= device.peak(8) and (not device.hour or device.sold), device.name
    for name in ("rtx-3060", "rtx-5090", "m4-max", "rx-7900-xtx", "c7i.8xlarge", "h100"):
        assert name in DEVICES


def test_an_own_device_is_of_figures_or_of_another() -> None:
    own = own_device(None, 24, 1000, 80)
    assert (own.memory, own.bandwidth, own.peak(16), own.peak(8)) == (24e9, 1e12, 8e13, 8e13)
    changed = own_device(device_of("h100"), 94)
    assert changed.memory == 94e9 and changed.bandwidth == DEVICES["h100"].bandwidth and changed.name == "h100-changed"
    with pytest.raises(ConfigError, match="--tflops is needed"):
        own_device(None, 24, 1000)


def test_names_kinds_and_prices() -> None:
    assert [d.name for d in devices_named("h100, l4,h100")] == ["h100", "l4"]
    assert {d.kind for d in devices_named("apple,cpu")} == {"apple", "cpu"} and len(devices_named("all")) == len(
        DEVICES
    )
    priced = with_prices(devices_named("h100,l4"), "h100=2.5")
    assert priced[0].hour == 2.5 and priced[1].hour == DEVICES["l4"].hour
    with pytest.raises(ConfigError, match="did you mean"):
        devices_named("rtx-409")
    for wrong in ("h100", "h100=-1", "x=1"):
        with pytest.raises(ConfigError, match="--prices"):
            with_prices([], wrong)


def test_the_cheapest_that_serves_comes_first(tmp_path: Path) -> None:
    config = flat_config(model=written(tmp_path, LLAMA_7B))
    offers = compare_devices(config, devices_named("rtx-3060,rtx-4090,h100,t4,a100-40gb,m4-max"), LOAD, Slo(itl=60))
    served = [offer for offer in offers if offer.count]
    prices = [offer.cost.hour for offer in served if offer.cost is not None]
    assert prices == sorted(prices) and len(prices) >= 2
    assert [offer.cost is None for offer in served] == sorted(offer.cost is None for offer in served)
    assert any(offer.device.name == "h100" and offer.cost is None for offer in served)
    assert all(offer.why for offer in offers if not offer.count)
    missed = offer_of(config, DEVICES["t4"], LOAD, Slo(itl=0.01))
    assert not missed.count and "misses the targets" in missed.why


def test_what_is_no_gpu_is_planned_as_the_processor_that_it_is(tmp_path: Path) -> None:
    config = flat_config(model=written(tmp_path, LLAMA_7B))
    planner = Planner(config, Machine(DEVICES["m4-max"]))
    assert planner.choice.backend == "cpu" and "not on its GPU" in planner.predict(LOAD).note
    small = offer_of(config, DEVICES["m1"], LOAD, Slo())
    assert small.ranks <= 1, "several of them make no engine"


def test_the_command_compares_and_draws(run: Run, tmp_path: Path) -> None:
    model, chart = written(tmp_path / "m", LLAMA_7B), tmp_path / "devices.svg"
    words = ("plan", model, "--devices", "consumer,l4", "--load", "rate=1,input=256,output=64", "--slo", "itl=60")
    code, out, err = run(*words, "--chart", str(chart))
    assert code == 0, err
    for said in ("USD an hour", "rtx-4090", "launch price", "next:", "--device "):
        assert said in out
    assert "rtx" in chart.read_text() and ET.fromstring(chart.read_text()).tag.endswith("svg")
    code, out, _ = run(*words, "--json", "-q")
    offers = json.loads(out)["offers"]
    assert code == 0 and offers[0]["cost"]["hour"] > 0 and offers[0]["device"]["name"] in DEVICES


def test_the_command_plans_an_own_device(run: Run, tmp_path: Path) -> None:
    model = written(tmp_path / "m", LLAMA_7B)
    figures = ("--memory-gb", "48", "--bandwidth-gbs", "900", "--tflops", "100")
    code, out, err = run("plan", model, *figures)
    assert code == 0 and "figures that were given" in out and "1 own" in out, err
    for words, why in (
        (("--memory-gb", "48"), "--bandwidth-gbs is needed"),
        (("--devices", "all", "--tflops", "1"), "an own one is planned alone"),
        (("--device", "cpu", *figures), "is measured here"),
        (("--chart", "x.svg"), "give --devices all"),
        (("--devices", "all", "-o", "x"), "leave --devices out"),
        (("--devices", "quantum"), "--devices quantum"),
    ):
        code, _, err = run("plan", model, *words)
        assert code == 2 and why in err, err
