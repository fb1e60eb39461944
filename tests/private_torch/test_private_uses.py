"""Every part of torch that is not public and that the source names is in the table of what happens without it."""

from __future__ import annotations

import inspect
from itertools import chain

import pytest
import source_scan
import taken_away
import torch
from taken_away import COMPILED_FALLBACKS, ERROR_OF_TORCH, ERRORS, FALLBACKS

from shardwise.errors import TorchPartError
from shardwise.private_torch import REQUIRED, parts

# Checked where the parts below are, as attributes of objects.
OF_REQUIRED = {
    "._backward_hooks": "Tensor",
    "._base": "Tensor",
    "._cdata": "UntypedStorage",
    "._post_accumulate_grad_hooks": "Tensor",
    "._schema": "ops.aten.neg.default",
    "._version": "Tensor",
}
# A list of modules that must not be imported.
NO_USE = ["core/shardwise/testing/light.py: torch._dynamo", "core/shardwise/testing/light.py: torch._inductor"]


def known():
    cases = [*FALLBACKS, *COMPILED_FALLBACKS, *ERRORS, ERROR_OF_TORCH]
    return {*taken_away.required(), *OF_REQUIRED, *chain.from_iterable(case.names for case in cases)}


def test_every_use_says_what_happens_without_it():
    uses = source_scan.shelf()
    assert uses - known() == set(), "add a case to taken_away.py"
    above = {name for name in known() if any(use.startswith(f"{name}.") for use in uses)}
    assert known() - uses - above - {*taken_away.UNDOCUMENTED} == set(), "nothing names it any more"
    assert all(f"torch.{owner}{name}" in REQUIRED for name, owner in OF_REQUIRED.items())
    assert set(REQUIRED) < set(taken_away.required())


def test_private_parts_are_named_on_the_shelf_alone():
    attributes = {name for name in source_scan.shelf() if name.startswith(".")}
    assert source_scan.elsewhere(attributes) == NO_USE


PLANTED = """
import torch
from torch._ops import OpOverload
import torch._dynamo
def f(op, x):
    op._schema, torch._C._nn, torch.ops.aten._foreach_add.List
    getattr(x, "_base"), getattr(torch.Tensor, "_make_subclass"), x.shape
    return "torch._decomp.decomposition_table", self._mine
"""


def test_the_scan_sees_what_it_looks_for(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    assert source_scan.Source(tmp_path / "planted.py").uses() == {
        *("._schema", "._base", "torch._C", "torch._C._nn", "torch._decomp.decomposition_table", "torch._dynamo"),
        *("torch._ops.OpOverload", "torch.Tensor._make_subclass"),
    }


def test_a_part_is_found_by_its_name():
    assert parts.find_part("torch.optim.optimizer._foreach_supported_types")
    assert parts.find_part("torch.ops.aten.mm.default._schema") is torch.ops.aten.mm.default._schema
    for name in ("torch._no_such_module.part", "torch._C._no_such_function", "torch.Tensor._none.of_this"):
        assert parts.find_part(name) is None
    assert parts.missing_parts(["torch.add", "torch._no"]) == ["torch._no"]
    with pytest.raises(TorchPartError, match=r"count: torch \S+ has no torch._no. Use a newer shardwise") as caught:
        parts.torch_part("torch._no", "count")(1, of=2)
    assert (caught.value.part, caught.value.torch) == ("torch._no", str(torch.__version__))
    assert parts.torch_part("torch.add", "add") is torch.add


# Functions of torch that a function of ours replaces while something runs: torch calls ours as it would call its own.
REPLACED = {
    "torch.distributed.distributed_c10d._process_group_name": ["ranks", "use_hashed_name"],
    "torch.amp.GradScaler._maybe_opt_step": ["self", "optimizer", "optimizer_state", "args", "kwargs"],
    "torch._subclasses.fake_tensor.run_fallback_kernel": ["fake_mode", "func", "flat_args", "args_spec", None],
    "torch.fx.experimental.proxy_tensor._sym_register": ["tracer", "func", "args", "out"],
}
# Arguments that we pass by name.
NAMED = {
    "torch.distributed._state_dict_utils._gather_state_dict": {"pg", "cpu_offload", "ranks_only"},
    "torch.library.Library.impl": {"with_keyset"},
    "torch._subclasses.fake_tensor.FakeTensorMode": {"allow_non_fake_inputs"},
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_has_the_arguments_that_the_replacement_takes(name):
    arguments = list(inspect.signature(parts.find_part(name)).parameters)
    expected = REPLACED[name]
    assert [a if e else None for a, e in zip(arguments, expected, strict=True)] == expected


@pytest.mark.parametrize("name", NAMED)
def test_arguments_have_the_names_by_which_they_are_passed(name):
    assert NAMED[name] <= set(inspect.signature(parts.find_part(name)).parameters)


def test_the_mark_of_sizes_is_the_one_that_torchs_function_leaves():
    marked = torch.empty(2, 3)
    parts.find_part("torch._dynamo.decorators.mark_unbacked")(marked, 1)
    assert marked._dynamo_unbacked_indices == {1}


def test_the_table_names_each_part_once():
    cases = [*FALLBACKS, *COMPILED_FALLBACKS, *ERRORS, ERROR_OF_TORCH]
    names = list(chain(taken_away.required(), *(case.names for case in cases)))
    assert sorted(names) == sorted(set(names))
