"""Which replica gets a request: caches are followed, load stays even, and who is not ready is spared."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest

from quire.core.request import Request
from quire.engine.processes.router import Router
from replica_edge import BLOCK, REPLICAS
from replica_edge import routed_request as request

Choose = Callable[[Request], int]


class Cache:
    """Prefixes of whole blocks, for ever."""

    def __init__(self) -> None:
        self._known: set[tuple[int, ...]] = set()

    def hit(self, tokens: tuple[int, ...]) -> int:
        """Tokens of the prompt that are known; from now on all are."""
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        found = next((end - BLOCK for end in ends if tokens[:end] not in self._known), len(tokens) // BLOCK * BLOCK)
        self._known |= {tokens[:end] for end in ends}
        return found


def talk(choose: Choose, left: Callable[[int], None]) -> tuple[float, float]:
    """200 conversations, some 40 at a time: (hits beside those of one cache, most work beside the mean)."""
    rng, numbers = random.Random(3), count()
    system = [rng.randrange(1000) for _ in range(100)]
    open_talks: list[tuple[list[int], int]] = []
    waiting = [
        (system + [rng.randrange(1000) for _ in range(rng.randint(20, 200))], rng.randint(2, 9)) for _ in range(200)
    ]
    caches, whole, work, hits, most = [Cache() for _ in range(REPLICAS)], Cache(), [0] * REPLICAS, 0, 0
    running: list[int] = []
    while waiting or open_talks:
        while waiting and len(open_talks) < 40:
            open_talks.append(waiting.pop())
        tokens, turns = open_talks.pop(rng.randrange(len(open_talks)))
        place = choose(request(next(numbers), tokens))
        running.append(place)
        hit = caches[place].hit(tuple(tokens))
        hits, most = hits + hit, most + whole.hit(tuple(tokens))
        work[place] += len(tokens) - hit + 32
        if len(running) > 24:
            left(running.pop(rng.randrange(len(running))))
        if turns > 1:
            tokens += [rng.randrange(1000) for _ in range(rng.randint(30, 120))]
            open_talks.append((tokens, turns - 1))
    return hits / most, max(work) / (sum(work) / REPLICAS)


def test_conversations_find_their_prefixes_and_replicas_share_the_work() -> None:
    router, ready, turns = Router(REPLICAS, BLOCK, 1 << 20), [True] * REPLICAS, count()
    hits, imbalance = talk(lambda asked: router.place(asked, ready), router.left)
    rng = random.Random(1)
    by_chance, _ = talk(lambda asked: rng.randrange(REPLICAS), lambda place: None)
    in_turns, _ = talk(lambda asked: next(turns) % REPLICAS, lambda place: None)
    print(f"hits {hits:.3f} of one cache (chance {by_chance:.3f}, in turns {in_turns:.3f}), imbalance {imbalance:.3f}")
    assert hits >= 0.95 > max(by_chance, in_turns) and imbalance <= 1.25


def test_one_prefix_of_all_does_not_crowd_one_replica() -> None:
    router, prompt = Router(4, BLOCK, 1000), list(range(320))
    places = [router.place(request(i, prompt), [True] * 4) for i in range(40)]
    assert max(map(places.count, range(4))) <= 1.25 * 10 + 2


def test_who_is_not_ready_is_spared_and_a_new_cache_is_empty() -> None:
    router, prompt = Router(2, BLOCK, 1000), list(range(64))
    first = router.place(request(0, prompt), [True, True])
    router.left(first)
    assert router.place(request(1, prompt), [True, True]) == first
    router.left(first)
    ready = [i != first for i in range(2)]
    assert router.place(request(2, prompt), ready) == 1 - first
    router.left(1 - first)
    router.forget(1 - first)
    assert router.place(request(3, prompt), [True, True]) == first
    assert router.place(request(4, prompt), [False, False]) in (0, 1)


@pytest.mark.parametrize("field", ["cache_salt", "adapter"])
def test_prefixes_of_others_are_not_followed(field: str) -> None:
    from msgspec.structs import replace

    router, ready, own = Router(8, BLOCK, 1000), [True] * 8, list(range(320))
    places = set()
    for name in "abcdefgh":
        place = router.place(replace(request(0, own), **{field: name}), ready)
        router.left(place)
        places.add(place)
    assert len(places) == 8


def test_what_is_remembered_is_bounded() -> None:
    router = Router(1, BLOCK, 100)
    for i in range(50):
        router.place(request(i, range(i, i + 160)), [True])
    assert len(router._held[0]) == 100


def test_places_are_those_of_the_plain_rule() -> None:
    """Everybody's cache is looked at and everybody's work compared, one by one."""
    rng, replicas, most = random.Random(5), 6, 60
    router = Router(replicas, BLOCK, most)
    held: list[dict[tuple[int, ...], None]] = [{} for _ in range(replicas)]
    work, flight = [0.0] * replicas, [0] * replicas
    texts = [tuple(rng.randrange(1000) for _ in range(rng.randint(40, 400))) for _ in range(12)]
    for number in range(1500):
        prompt = rng.choice(texts)[: rng.randint(20, 400)] + tuple(
            rng.randrange(1000) for _ in range(rng.choice((0, 30)))
        )
        ready = [rng.random() < 0.8 for _ in range(replicas)]
        some = [i for i in range(replicas) if ready[i]] or list(range(replicas))
        keys = [prompt[: end + BLOCK] for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        found = [next((n for n, key in enumerate(keys) if key not in held[i]), len(keys)) for i in range(replicas)]
        mean = (sum(flight[i] for i in some) + 1) / len(some)
        best = max(some, key=lambda i: (found[i], -flight[i], -work[i]))
        if not found[best] * BLOCK > 0.5 * len(prompt) or flight[best] >= 1.25 * mean + 2:
            best = min(some, key=lambda i: (flight[i] > mean, work[i]))
        assert router.place(request(number, prompt), ready) == best
        for key in reversed(keys):
            held[best].pop(key, None)
            held[best][key] = None
        held[best] = dict(list(held[best].items())[-most:])
        work = [each * 0.5 ** (1 / 200) for each in work]
        work[best] += max(1, len(prompt) - found[best] * BLOCK + 32)
        flight[best] += 1
        while sum(flight) > 20:
            gone = rng.choice([i for i in range(replicas) if flight[i]])
            flight[gone] -= 1
            router.left(gone)
        if rng.random() < 0.01:
            gone = rng.randrange(replicas)
            held[gone].clear()
            router.forget(gone)
