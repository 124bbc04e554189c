"""Which blocks are found, and which names a pattern matches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.search.checkpointing import (
    find_repeated_blocks,
    match_modules,
    reason_not_checkpointable,
    recomputable,
)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.gate(inputs)


class Model(nn.Module):
    """Holds what it is given, by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_equal_members_of_a_module_list_are_found_in_module_order() -> None:
    model = Model(embed=nn.Embedding(3, 4), layers=nn.ModuleList([Block(), Block(), Block()]), head=nn.Linear(4, 3))
    assert find_repeated_blocks(model) == ("layers.0", "layers.1", "layers.2")


def test_a_single_block_is_no_repetition() -> None:
    assert find_repeated_blocks(Model(layers=nn.ModuleList([Block()]))) == ()


def test_members_of_different_width_or_dtype_are_not_equal() -> None:
    assert find_repeated_blocks(nn.ModuleList([Block(4), Block(5)])) == ()
    assert find_repeated_blocks(nn.ModuleList([Block(4), Block(4).double()])) == ()


def test_members_of_different_class_with_equal_parameters_are_not_equal() -> None:
    class Other(Block):
        pass

    assert find_repeated_blocks(nn.ModuleList([Block(), Other()])) == ()


def test_equal_members_count_although_other_members_stand_between_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.Dropout(), Block(), Block(8), nn.Linear(4, 4))
    assert find_repeated_blocks(model) == ("1", "3")


def test_two_groups_in_one_container_are_both_taken() -> None:
    model = nn.Sequential(Block(4), Block(4), nn.Linear(4, 8), Block(8), Block(8))
    assert find_repeated_blocks(model) == ("0", "1", "3", "4")


def test_encoder_and_decoder_lists_are_both_taken() -> None:
    model = Model(encoder=nn.ModuleList([Block(), Block()]), decoder=nn.ModuleList([Block(8), Block(8)]))
    assert find_repeated_blocks(model) == ("encoder.0", "encoder.1", "decoder.0", "decoder.1")


def test_the_outermost_repetition_wins() -> None:
    def stage() -> nn.Sequential:
        return nn.Sequential(Block(), Block())

    assert find_repeated_blocks(nn.Sequential(stage(), stage())) == ("0", "1")


def test_stages_that_differ_are_searched_inside() -> None:
    stages = nn.Sequential(nn.Sequential(Block(4), Block(4)), nn.Sequential(Block(8), Block(8), Block(8)))
    assert find_repeated_blocks(stages) == ("0.0", "0.1", "1.0", "1.1", "1.2")


def test_a_module_list_of_module_lists_is_seen_through() -> None:
    """A ``ModuleList`` is never called, so that it cannot be the block; its members can, also one per inner list."""
    levels = nn.ModuleList([nn.ModuleList([Block(), nn.Linear(4, 4)]), nn.ModuleList([Block(), nn.Linear(4, 4)])])
    assert find_repeated_blocks(levels) == ("0.0", "1.0")


def test_a_lone_linear_is_no_block_but_linear_with_activation_is() -> None:
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    paired = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert find_repeated_blocks(flat) == ()
    assert find_repeated_blocks(paired) == ("0", "1")


def test_a_leaf_with_a_forward_of_its_own_and_a_recurrent_layer_are_blocks() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.tanh(inputs @ self.weight).exp()

    assert find_repeated_blocks(nn.ModuleList([Raw(), Raw()])) == ("0", "1")
    assert find_repeated_blocks(nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)])) == ("0", "1")


def test_members_without_parameters_are_left_out() -> None:
    quiet = nn.Sequential(nn.ReLU(), nn.Dropout())
    assert find_repeated_blocks(nn.ModuleList([quiet, nn.Sequential(nn.ReLU(), nn.Dropout())])) == ()


def test_a_block_listed_twice_is_repeated_and_named_once() -> None:
    shared = Block()
    assert find_repeated_blocks(Model(layers=nn.ModuleList([shared, shared]))) == ("layers.0",)


def test_a_block_also_held_under_another_name_is_named_once() -> None:
    shared = Block()
    model = Model(first=shared, layers=nn.ModuleList([shared, Block()]))
    assert find_repeated_blocks(model) == ("layers.0", "layers.1")


def test_a_shared_list_is_searched_once() -> None:
    layers = nn.ModuleList([Block(), Block()])
    assert find_repeated_blocks(Model(a=layers, b=layers)) == ("a.0", "a.1")


def test_no_block_is_taken_around_one_that_was_taken_on_another_path() -> None:
    shared = nn.Sequential(Block(), Block())
    model = Model(first=shared, layers=nn.ModuleList([shared, nn.Sequential(Block(), Block())]))
    assert find_repeated_blocks(model) == ("first.0", "first.1", "layers.1.0", "layers.1.1")


def test_blocks_that_recompute_already_are_left_out() -> None:
    model = Model(layers=nn.ModuleList([Block(), Block()]))
    model.gradient_checkpointing = True
    assert find_repeated_blocks(model) == ()


def test_what_is_recomputed_anyway_is_told_and_not_chosen() -> None:
    model = Model(layers=nn.ModuleList([Block(), Block(), Block()]), tail=Block())
    seen = {"layers.1.linear", "layers", "layers.10", "tail"}  # a part of a block, its list, and others
    found = recomputable(model, ("tail", "layers.[12]"), seen)
    assert found.blocks == ("layers.0", "layers.2")
    assert found.matched == ("layers.2",)
    assert found.anyway == ("layers.1", "tail")
    model.gradient_checkpointing = True  # type: ignore[assignment]
    found = recomputable(model, "auto")
    assert (found.blocks, found.anyway) == ((), ("layers.0", "layers.1", "layers.2"))


def test_a_block_around_one_that_recomputes_is_recomputed_in_part() -> None:
    model = nn.Sequential(nn.Sequential(Block(), nn.Tanh()), nn.Sequential(Block(), nn.Tanh()))
    model[0][0].gradient_checkpointing = True
    found = recomputable(model, ("*",))
    assert (found.matched, found.anyway) == (("1",), ("0",))


def test_of_every_second_layer_the_others_are_neither_recomputed_nor_touched() -> None:
    model = Model(layers=nn.ModuleList([Block(), Block()]))
    model.gradient_checkpointing = True  # type: ignore[assignment]
    for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
        layer.gradient_checkpointing = index == 0
    found = recomputable(model, "auto")
    assert (found.blocks, found.anyway) == ((), ("layers.0",))


def test_compiled_and_scripted_blocks_are_left_out_with_a_reason() -> None:
    compiled = torch.compile(Block(), backend="eager")
    compiled_in_place = Block()
    compiled_in_place.compile(backend="eager")
    assert "compiled" in str(reason_not_checkpointable(compiled))
    assert "compiled" in str(reason_not_checkpointable(compiled_in_place))
    assert "its submodule '0' is compiled" in str(reason_not_checkpointable(nn.Sequential(compiled)))
    assert reason_not_checkpointable(Block()) is None
    assert find_repeated_blocks(nn.ModuleList([compiled, torch.compile(Block(), backend="eager")])) == ()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_block_has_a_reason() -> None:
    assert "ScriptModule" in str(reason_not_checkpointable(torch.jit.script(nn.Sequential(nn.Linear(2, 2)))))


def test_a_model_without_containers_has_no_blocks() -> None:
    assert find_repeated_blocks(nn.Linear(2, 2)) == ()


def test_patterns_match_qualified_names_in_module_order() -> None:
    model = Model(encoder=nn.ModuleList([Block(), Block()]), decoder=nn.ModuleList([Block()]))
    assert match_modules(model, ["decoder.*", "encoder.1"]) == ("encoder.1", "decoder.0")


def test_what_lies_inside_a_matched_module_is_dropped() -> None:
    model = Model(encoder=nn.ModuleList([Block(), Block()]))
    assert match_modules(model, ["encoder.*"]) == ("encoder.0", "encoder.1")
    assert match_modules(model, ["*.linear", "encoder.0"]) == ("encoder.0", "encoder.1.linear")


def test_no_patterns_match_nothing() -> None:
    assert match_modules(Model(encoder=Block()), ()) == ()


def test_a_pattern_without_a_match_names_what_is_close() -> None:
    model = Model(blocks=nn.ModuleList([Block()]))
    with pytest.raises(ConfigurationError) as error:
        match_modules(model, ["block.0"])
    assert str(error.value) == (
        "activation_checkpointing pattern 'block.0' matches none of the 4 modules of the model. Close names: "
        "'blocks.0', 'blocks', 'blocks.0.gate'. Patterns are those of fnmatch on qualified names, such as 'blocks.*'."
    )


def test_a_pattern_that_matches_only_a_list_points_to_its_members() -> None:
    model = Model(blocks=nn.ModuleList([Block()]))
    with pytest.raises(ConfigurationError) as error:
        match_modules(model, ["blocks"])
    assert str(error.value) == (
        "activation_checkpointing pattern 'blocks' matches only 'blocks', a ModuleList: its members are called, never "
        "it, so that nothing would be recomputed. Use 'blocks.*'."
    )
