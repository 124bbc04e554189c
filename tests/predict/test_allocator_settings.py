"""The text of PYTORCH_CUDA_ALLOC_CONF: what it says, and what is refused.

Run: ``pytest tests/predict/test_allocator_settings.py``.
"""

from __future__ import annotations

import pytest

from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.predict.allocator_settings import AllocatorSettings

MIB = 2**20


def test_every_option_that_changes_memory_is_read() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:128, max_non_split_rounding_mb:64, large_segment_size_mb:32,"
        "garbage_collection_threshold:0.8, roundup_power2_divisions:[256:1,512:2,>:8], per_process_memory_fraction:0.5"
    )
    assert AllocatorSettings.from_text(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        large_segment_bytes=32 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=((256, 1), (512, 2), (None, 8)),
        per_process_memory_fraction=0.5,
    )


def test_no_text_is_torchs_defaults() -> None:
    assert AllocatorSettings.from_text("") == AllocatorSettings()
    assert AllocatorSettings.from_text("expandable_segments:False,") == AllocatorSettings()
    assert AllocatorSettings().non_split_rounding_bytes == 20 * MIB


def test_options_without_effect_are_listed() -> None:
    found = AllocatorSettings.from_text("backend:native,pinned_use_background_threads:True")
    assert found == AllocatorSettings(without_effect=("backend", "pinned_use_background_threads"))


def test_a_number_of_divisions_holds_for_every_size() -> None:
    assert AllocatorSettings.from_text("roundup_power2_divisions:4").divisions_by_interval() == (4,) * 16


def test_the_first_of_a_list_of_divisions_holds_below_it_and_the_last_above() -> None:
    # As torch 2.13 answers after torch._C._accelerator_setAllocatorSettings: intervals begin at 1, 2, 4, ... MiB.
    lists = {
        "[256:1,512:2,1024:4,>:8]": (1,) * 9 + (2, 4) + (8,) * 5,
        "[4:8,>:2]": (8, 8, 8) + (2,) * 13,
        "[>:2]": (0,) + (2,) * 15,
        "[64:0,4:2]": (0, 0, 2) + (0,) * 13,
    }
    for text, divisions in lists.items():
        assert AllocatorSettings.from_text(f"roundup_power2_divisions:{text}").divisions_by_interval() == divisions


def test_a_fraction_of_the_device_is_allowed() -> None:
    assert AllocatorSettings(per_process_memory_fraction=0.5).allowed_bytes(1001) == 500
    assert AllocatorSettings().allowed_bytes(1001) is None


BEGIN = "The allocator's settings (PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF) have "
DIVISIONS = "not a power of two, nor a list such as [256:1,512:2,>:8] of powers of two in MiB and divisions (0: none)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:10", "'max_split_size_mb:10', not a whole number of MiB from 20."),
        ("max_split_size_mb:x", "'max_split_size_mb:x', not a whole number of MiB from 20."),
        ("max_split_size_mb:20,large_segment_size_mb:30", "'max_split_size_mb:20', not a whole number of MiB from 30."),
        ("max_non_split_rounding_mb:19", "'max_non_split_rounding_mb:19', not a whole number of MiB from 20."),
        ("large_segment_size_mb:10", "'large_segment_size_mb:10', not a whole number of MiB from 11."),
        ("expandable_segments:true", "'expandable_segments:true', not one of True, False."),
        ("expandable_segments", "'expandable_segments', without a value; write key:value."),
        ("expandable_segments:", "'expandable_segments', without a value; write key:value."),
        ("garbage_collection_threshold:1", "'garbage_collection_threshold:1', not a number above 0 and below 1."),
        ("garbage_collection_threshold:a", "'garbage_collection_threshold:a', not a number above 0 and below 1."),
        ("per_process_memory_fraction:1.5", "'per_process_memory_fraction:1.5', not a number from 0 to 1."),
        ("roundup_power2_divisions:3", f"'roundup_power2_divisions:3', {DIVISIONS}."),
        ("roundup_power2_divisions:[3:1]", f"'roundup_power2_divisions:[3:1]', {DIVISIONS}."),
        ("roundup_power2_divisions:[4:3]", f"'roundup_power2_divisions:[4:3]', {DIVISIONS}."),
        ("roundup_power2_divisions:[4:2", f"'roundup_power2_divisions:[4:2', {DIVISIONS}."),
        ("backend:other", "'backend:other', not one of native, cudaMallocAsync."),
    ],
)
def test_a_malformed_value_is_refused_with_what_it_may_be(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        AllocatorSettings.from_text(text)
    assert str(refusal.value) == BEGIN + message


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        AllocatorSettings.from_text("max_split:20")
    message = str(refusal.value)
    assert message.startswith(BEGIN + "'max_split:20', no option of torch 2.13's allocator; the options are ")
    assert "max_split_size_mb" in message
    assert "pinned_free_catch_all" in message


def test_other_allocators_are_not_replayed() -> None:
    with pytest.raises(UnsupportedError) as refusal:
        AllocatorSettings.from_text("backend:cudaMallocAsync")
    assert str(refusal.value) == (
        "backend:cudaMallocAsync in the allocator's settings is another allocator, with other rules; "
        "leave it out or use 'native'."
    )
    with pytest.raises(UnsupportedError, match="refuses requests before cached memory was given back"):
        AllocatorSettings.from_text("throw_on_cudamalloc_oom:True")
