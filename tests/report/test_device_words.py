"""A device in one line."""

from __future__ import annotations

from dataclasses import replace

from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.hardware.device import Neighbour
from lightning_memfit.report.device_words import device_words
from lightning_memfit.units import GIB

T4 = catalog_device("t4")


def test_a_gpu_elsewhere_says_so_with_its_memory_and_what_is_not_known() -> None:
    assert device_words(T4) == (
        "Tesla T4 (not in this machine, 14.56 GiB in all, compute capability 7.5, not known: bytes of the context)"
    )
    # AMD's have no compute capability.
    assert "compute capability" not in device_words(catalog_device("mi300x"))


def test_a_gpu_of_this_machine_names_its_neighbours_and_what_is_particular_about_it() -> None:
    present = replace(T4, is_present=True, unknowns=())
    two = (Neighbour(pid=1, held_bytes=GIB), Neighbour(pid=2, held_bytes=2 * GIB))
    assert device_words(replace(present, neighbours=two)).endswith("2 other processes on it with 3.000 GiB)")
    one = (Neighbour(pid=1, held_bytes=None),)
    assert device_words(replace(present, neighbours=one)).endswith("1 other process on it)")
    some = (*two, *one)
    assert device_words(replace(present, neighbours=some)).endswith("3 other processes on it with at least 3.000 GiB)")
    particular = device_words(replace(present, spills=True, unified_memory=True, mig_profile="1g.10gb"))
    assert "MIG 1g.10gb, memory shared with the host, the driver moves what does not fit to the host" in particular


def test_a_word_for_the_unknown_that_is_new_is_shown_as_it_is() -> None:
    assert device_words(replace(T4, unknowns=("rates", "novel"))).endswith("not known: rates, novel)")
