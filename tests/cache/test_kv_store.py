"""A store behind the KV cache: what is kept, what is found again, by whom, and what becomes of damage."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_runner import golden, request
from quire.cache import disk
from quire.cache.blocks import state_key
from quire.cache.disk import DiskStore
from quire.cache.host import HostStore
from quire.cache.store_folder import StoreFolder, taken
from quire.cache.tiers import PATIENCE, StoreKey, StoreRates, StoreSizes
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.engine.engine_options import engine_config
from storing_engine import SIZES, StoringEngine

BYTES, STATE_BYTES = 3000, 7000
TOKENS = (1, 2, 3, 4)
GB = 10**9


def data_of(number: int) -> np.ndarray[Any, Any]:
    return np.full(BYTES, number, np.uint8)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def wanted(*numbers: int) -> list[StoreKey]:
    return [StoreKey(key_of(number), TOKENS) for number in numbers]


def open_store(folder: Path, facts: str = "model", most: int = GB) -> DiskStore:
    return DiskStore(StoreFolder(folder, facts), StoreSizes(BYTES, STATE_BYTES), most)


def written(store: DiskStore, *numbers: int) -> None:
    """Put these blocks and wait for their files."""
    for number in numbers:
        store.put(key_of(number), TOKENS, data_of(number))
    end = time.monotonic() + 30
    while store._pending:
        assert time.monotonic() < end
        time.sleep(0.001)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/[0-9a-f][0-9a-f]/*"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = open_store(tmp_path / "kv")
    yield made
    made.close(5)


def test_what_was_put_is_found_also_by_who_opens_the_folder_later(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    for number in (1, 2):
        first.put(key_of(number), TOKENS, data_of(number))
    assert first.has(key_of(1)), "while it waits to be written, too"
    first.close(30)
    second = open_store(tmp_path)
    found = second.read(wanted(1, 2, 3))
    assert [int(data[0]) for data in found.values()] == [1, 2] and second.has(key_of(2)) and not second.has(key_of(3))
    second.close(5)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(tmp_path))


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def cut(data: bytearray) -> None:
    del data[-1]


def lengthen(data: bytearray) -> None:
    data += b"x"


def empty(data: bytearray) -> None:
    data.clear()


def other_tokens(data: bytearray) -> None:
    data[disk.HEADER.size] ^= 1


def other_magic(data: bytearray) -> None:
    data[0] ^= 1


@pytest.mark.parametrize("harm", [flip, cut, lengthen, empty, other_tokens, other_magic])
def test_a_damaged_block_is_a_miss_and_goes(store: DiskStore, tmp_path: Path, harm: Any) -> None:
    written(store, 1, 2, 3)
    path = store._folder.path(key_of(2))
    changed = bytearray(path.read_bytes())
    harm(changed)
    path.write_bytes(changed)
    assert list(store.read(wanted(1, 2, 3))) == [key_of(1)], "what is behind it is worth nothing"
    assert store.counts.bad == 1 and not path.exists() and not store.has(key_of(2))
    written(store, 2)
    assert list(store.read(wanted(1, 2, 3))) == [key_of(1), key_of(2), key_of(3)]


def test_a_block_under_the_name_of_another_is_a_miss(store: DiskStore) -> None:
    written(store, 1, 2)
    store._folder.path(key_of(1)).replace(store._folder.path(key_of(2)))
    assert store.read(wanted(2)) == {} and store.counts.bad == 1
    written(store, 3)
    assert store.read([StoreKey(key_of(3), (9, 9, 9, 9))]) == {}, "of other tokens"


def test_what_is_least_recently_used_makes_room(tmp_path: Path) -> None:
    size = taken(BYTES + 80)
    store = open_store(tmp_path, most=20 * size)
    for number in range(20):
        written(store, number)
        os.utime(store._folder.path(key_of(number)), (number, number))
    assert len(files(tmp_path)) == 20
    assert store.read(wanted(0, 1))  # now they are the last
    written(store, 20)
    left = {number for number in range(21) if store.has(key_of(number))}
    assert {0, 1, 20} <= left and 17 <= len(left) <= 18 and 2 not in left
    assert sum(taken(path.stat().st_size) for path in files(tmp_path)) <= 20 * size
    assert store.counts.bytes == len(left) * size and store.counts.blocks == len(left)
    store.close(5)


def test_two_engines_share_one_folder_and_its_bound(tmp_path: Path) -> None:
    size = taken(BYTES + 80)
    stores = [open_store(tmp_path, most=30 * size) for _ in range(2)]
    for number in range(0, 60, 2):
        written(stores[0], number)
        written(stores[1], number + 1)
        assert sum(taken(path.stat().st_size) for path in files(tmp_path)) <= 30 * size
    assert stores[0].has(key_of(59)) and stores[0].read(wanted(59)) and stores[1].read(wanted(58))
    for each in stores:
        each.close(5)


def test_other_facts_find_nothing(tmp_path: Path) -> None:
    first, other = StoreFolder(tmp_path, "a"), StoreFolder(tmp_path, "b")
    assert first.chain != other.chain and first.home != other.home
    assert StoreFolder(tmp_path, "a").chain == first.chain
    assert StoreFolder(tmp_path / "elsewhere", "a").chain != first.chain, "each folder has its own secret"


def test_a_reset_makes_all_that_was_kept_unfindable_for_all_who_are_told(tmp_path: Path) -> None:
    first, second, third = (StoreFolder(tmp_path, "a") for _ in range(3))
    old = first.chain
    first.renew()
    assert first.chain != old
    second.renew()
    assert second.chain == first.chain, "engines that are told one after the other agree"
    assert third.chain == old, "until it is told"
    second.renew()
    assert second.chain != first.chain, "a second time"
    assert StoreFolder(tmp_path, "a").chain == second.chain


def test_a_full_disk_stops_nothing(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_put_down", fails)
    written(store, 1)
    assert store.counts.dropped == 1 and store.counts.written == 0 and store.full()
    store.put(key_of(2), TOKENS, data_of(2))
    assert store.counts.dropped == 2 and not store.has(key_of(2))
    monkeypatch.undo()
    store._paused_until = 0.0
    written(store, 1)
    assert store.has(key_of(1)) and not list(store._folder.folder.glob("*/*/.*"))


def test_folders_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-store .*file: .*; name a folder"):
        StoreFolder(tmp_path / "file", "a")
    StoreFolder(tmp_path / "open", "a")
    (tmp_path / "open" / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others; chmod 600"):
        StoreFolder(tmp_path / "open", "a")
    (tmp_path / "open" / "secret").unlink()
    (tmp_path / "open" / "secret").write_bytes(b"short")
    (tmp_path / "open" / "secret").chmod(0o600)
    with pytest.raises(ConfigError, match="is damaged"):
        StoreFolder(tmp_path / "open", "a")
    for options, text in (
        ({"enable_prefix_caching": False}, "--enable-prefix-caching"),
        ({"kv_store_gb": 0.0}, "--kv-store-gb 0.0 must lie"),
        ({"pipeline_parallel_size": 2}, "of --pipeline-parallel-size have nothing is gathered"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine_config({"model": "", "kv_store": str(tmp_path)} | options)


KILLED = """
import sys, numpy as np
from pathlib import Path
from quire.cache.disk import DiskStore
from quire.cache.store_folder import StoreFolder
from quire.cache.tiers import StoreSizes
store = DiskStore(StoreFolder(Path(sys.argv[1]), "model"), StoreSizes(3000), 10**9)
number = 0
while True:
    if len(store._pending) < 50:
        store.put(number.to_bytes(16, "little"), (1, 2, 3, 4), np.full(3000, number % 256, np.uint8))
        number += 1
        if number == 100:
            print("on", flush=True)
"""


def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"on\n"
        writer.kill()
        writer.wait()
        writer.stdout.close()
    store, count = open_store(tmp_path), 0
    while store.has(key_of(count)):
        found = store.read(wanted(count))
        assert (found[key_of(count)] == count % 256).all()
        count += 1
    assert count >= 50 and store.counts.bad == 0
    store.close(5)


def test_reading_and_computing_are_compared_by_what_they_took() -> None:
    rates = StoreRates()
    assert rates.pays(1, 16), "nothing is known yet"
    rates.read(10, 0.1)
    rates.computed(1, 64, 1.0)
    assert rates.pays(1, 16) and not rates.token, "a step of decodes says nothing of prompts"
    rates.computed(100, 100, 1.0)
    assert rates.pays(1, 16), "10 ms beside 160 ms"
    for _ in range(30):
        rates.read(1, 1.0)
    tries = [rates.pays(1, 16) for _ in range(4 * PATIENCE)]
    assert tries.count(True) == 2 and tries.index(True) == PATIENCE - 1, "tried again ever more rarely"


def test_the_tier_in_memory_hands_down_what_has_no_room(store: DiskStore) -> None:
    host = HostStore(2 * BYTES, StoreSizes(BYTES), store)
    for number in range(4):
        host.put(key_of(number), TOKENS, data_of(number))
    assert len(host._blocks) == 2 and list(host.read(wanted(0, 3, 1, 9, 2))) == [key_of(n) for n in (0, 3, 1)]
    chain = store._folder.chain
    host.forget_all()
    assert not host._blocks and not store._pending and store._folder.chain != chain, "files stay, under keys of no one"


def test_states_are_kept_beside_blocks_each_in_its_size(tmp_path: Path) -> None:
    store, key, data = open_store(tmp_path), state_key(key_of(2)), np.full(STATE_BYTES, 7, np.uint8)
    written(store, 1, 2)
    store.put(key, TOKENS, data)
    assert (store.read([*wanted(1, 2), StoreKey(key, TOKENS)])[key] == 7).all()
    store.close(30)
    again = open_store(tmp_path)
    assert (again.read([StoreKey(key, TOKENS)])[key] == 7).all() and len(files(tmp_path)) == 3
    path = again._folder.path(key)
    changed = bytearray(path.read_bytes())
    flip(changed)
    path.write_bytes(changed)
    assert again.read([StoreKey(key, TOKENS)]) == {} and again.counts.bad == 1 and not path.exists()
    again.close(5)


def test_the_tier_in_memory_counts_bytes_of_states(store: DiskStore) -> None:
    host, sizes = HostStore(2 * STATE_BYTES, StoreSizes(BYTES, STATE_BYTES), store), [BYTES, STATE_BYTES]
    for number in range(3):
        host.put(key_of(number), TOKENS, data_of(number))
        host.put(state_key(key_of(number)), TOKENS, np.full(STATE_BYTES, number, np.uint8))
        assert host.counts.bytes - store.counts.bytes <= 2 * STATE_BYTES
    assert list(host._blocks) == [key_of(2), state_key(key_of(2))] and host._bytes == sum(sizes)


# ------------------------------------------------------------------------------------------------------- the scheduler


def ask(engine: StoringEngine, req: Request) -> int:
    """How many tokens of its prompt were found, once its answer is right."""
    engine.submit(req)
    engine.drain()
    assert engine.outputs[req.id, 0] == golden(req, 0, engine.max_model_len)
    return engine.ends[req.id, 0].cached_tokens


@pytest.mark.parametrize("windows", [(0,), (5,), (0, 5), (9, 0, 5)])
def test_another_engine_finds_what_the_first_one_kept(windows: tuple[int, ...]) -> None:
    store = HostStore(1000, SIZES)
    first = StoringEngine(24 * len(windows), windows=windows, store=store)
    assert ask(first, request("a", list(range(30)), 4)) == 0
    first.keep_all()
    second = StoringEngine(24 * len(windows), windows=windows, store=store)
    assert ask(second, request("b", list(range(30)), 4)) == 28
    assert ask(second, request("c", [*range(21), 40, 41, 42], 4)) == 20
    assert ask(second, request("d", list(range(30)), 4, salt="other")) == 0, "another tenant's"
    assert second.behind.misses == 0 and second.behind.hits >= 2


def test_what_was_evicted_comes_back() -> None:
    engine = StoringEngine(num_blocks=12, store=HostStore(1000, SIZES))
    for turn in range(3):
        for head in range(5):
            found = ask(engine, request(f"{turn}/{head}", [head, *range(29)], 2))
            assert found == (28 if turn else 0)


def test_a_sequence_whose_blocks_are_read_holds_up_nobody() -> None:
    store = HostStore(1000, SIZES)
    first = StoringEngine(24, store=store)
    ask(first, request("a", list(range(30)), 4))
    first.keep_all()
    engine = StoringEngine(24, store=store)
    engine.behind._delays.randint = lambda low, high: 20  # type: ignore[method-assign]
    slow = request("slow", list(range(30)), 4)
    quick = request("quick", [45, 46], 4, eos=())
    engine.submit(slow)
    engine.submit(quick)
    engine.drain()
    assert list(engine.ends) == [("quick", 0), ("slow", 0)]
    assert engine.outputs["slow", 0] == golden(slow, 0, 48) and engine.ends["slow", 0].cached_tokens == 28


def test_aborting_while_blocks_are_read_frees_all() -> None:
    store = HostStore(1000, SIZES)
    first = StoringEngine(24, store=store)
    ask(first, request("a", list(range(30)), 4))
    first.keep_all()
    engine = StoringEngine(24, store=store)
    engine.submit(request("gone", list(range(30)), 4))
    engine.step()
    assert len(engine.scheduler.recall) == 1 and engine.scheduler.has_work
    engine.scheduler.abort("gone")
    assert not engine.scheduler.has_work and not engine.pool.num_used
    assert ask(engine, request("after", list(range(30)), 4)) == 28


def test_a_block_that_is_lost_meanwhile_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore(1000, SIZES)
    first = StoringEngine(24, store=store)
    ask(first, request("a", list(range(30)), 4))
    first.keep_all()
    lost = random.Random(0)
    read = store.read
    monkeypatch.setattr(store, "read", lambda want: dict(list(read(want).items())[: lost.randint(0, len(want))]))
    for turn in range(20):
        engine = StoringEngine(24, store=store)
        assert ask(engine, request(f"b{turn}", list(range(30)), 4)) % 4 == 0
