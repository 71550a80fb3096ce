"""Ranks and their places along each axis."""

from __future__ import annotations

from itertools import product

import pytest

from quire.parallel.topology import AXES, Topology


@pytest.mark.parametrize("sizes", list(product((1, 2, 3), repeat=len(AXES))))
def test_groups_of_an_axis_part_the_ranks(sizes: tuple[int, ...]) -> None:
    """Each rank is in one group of each axis, at the place that it has along it, and places name one rank."""
    topology = Topology(**dict(zip(AXES, sizes, strict=True)))
    places = {tuple(topology.along(rank, axis) for axis in AXES): rank for rank in range(topology.world)}
    assert sorted(places.values()) == list(range(topology.world))
    for axis, rank in product(AXES, range(topology.world)):
        group = topology.group(rank, axis)
        assert group[topology.along(rank, axis)] == rank
        assert [topology.along(other, axis) for other in group] == list(range(len(group)))
        others = [each for each in AXES if each != axis]
        assert all(topology.along(other, each) == topology.along(rank, each) for other in group for each in others)


def test_ranks_of_one_layer_are_neighbours() -> None:
    assert Topology(tensor=2, pipeline=2).group(3, "tensor") == (2, 3)
    assert Topology(tensor=2, context=2, pipeline=2).group(1, "pipeline") == (1, 5)
