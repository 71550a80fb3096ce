"""How much may be in flight, and whose: what fits, what never could, what is left for others."""

from __future__ import annotations

import pytest

from quire.core.errors import BadRequest, Overloaded
from quire.engine.frontend.admission import AdmissionControl


def fill(admission: AdmissionControl, tenant: str) -> int:
    """How many requests of `tenant` are taken before one is refused."""
    for taken in range(1000):
        try:
            admission.enter(1, 1, tenant)
        except Overloaded as error:
            assert error.retry_after
            return taken
    raise AssertionError("nothing was refused")


def test_a_tenant_cannot_fill_the_queue_for_others_where_shares_are_fair() -> None:
    admission = AdmissionControl(90, 1 << 20, fair=True)
    assert fill(admission, "flood") == 80
    assert fill(admission, "late") > 0, "there is room for one that comes after a flood"
    admission.enter(1, 1, "last")
    admission.leave(80, 80, "flood")
    assert fill(admission, "flood") == 72, "what others have is missing"


def test_the_queue_is_full_for_all_alike_where_they_are_not() -> None:
    admission = AdmissionControl(90, 1 << 20)
    assert fill(admission, "flood") == 90
    with pytest.raises(Overloaded, match="the queue is full"):
        admission.enter(1, 1, "late")


def test_a_tenant_without_work_is_taken_wherever_there_is_room() -> None:
    admission = AdmissionControl(16, 1 << 20, fair=True)
    admission.enter(16, 1, "n is 16")
    admission.leave(16, 1, "n is 16")
    assert admission.sequences == 0


def test_a_key_has_a_bound_of_its_own() -> None:
    admission = AdmissionControl(90, 1 << 20)
    admission.enter(3, 1, "ann", most=4)
    with pytest.raises(Overloaded, match="the key of ann has 3 of 4 sequences"):
        admission.enter(2, 1, "ann", most=4)
    with pytest.raises(BadRequest, match="its key allows 4"):
        admission.enter(5, 1, "ann", most=4)
    admission.leave(3, 1, "ann")
    admission.enter(4, 1, "ann", most=4)
