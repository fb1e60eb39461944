"""Ops by name: what a name stands for, and that every command that takes an op takes the same names."""

import json
from itertools import product

import pytest
import torch
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.cli.ops import find_ops, one_of, ops_named
from shardwise.discovery.process import default_registry
from shardwise.errors import CallError

aten = torch.ops.aten


# -- what a name stands for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aten.mm.default", "torch.ops.aten.mm.default", "aten::mm.default", "mm.default"])
def test_a_full_name_is_one_op(name):
    assert find_ops(name) == [aten.mm.default]


@pytest.mark.parametrize("name", ["aten.mm", "mm", "aten::mm", "torch.ops.aten.mm", "torch.mm", "torch.Tensor.mm"])
def test_a_name_without_overload_is_all_of_them(name):
    assert find_ops(name) == [getattr(aten.mm, each) for each in sorted(aten.mm.overloads())]


@pytest.mark.parametrize("name", ["", "no_such_op", "aten.no_such_op", "aten.mm.no_such", "a.b.c.d", "no space", "..."])
def test_what_is_no_op_is_none(name):
    assert find_ops(name) == []


def test_other_namespaces_are_looked_in():
    @torch.library.custom_op("shardwise_ops::own_kernel", mutates_args=())
    def own_kernel(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    expected = [torch.ops.shardwise_ops.own_kernel.default]
    assert find_ops("own_kernel", ("aten", "shardwise_ops")) == expected
    assert find_ops("shardwise_ops::own_kernel") == expected


def test_what_is_no_op_is_an_error_with_close_names():
    with pytest.raises(
        CallError, match=r"torch knows no such op; close to it, with rules: .*_adaptive_avg_pool2d"
    ) as error:
        ops_named("aten.adaptive_avg_pol2d", default_registry())
    assert error.value.op == "aten.adaptive_avg_pol2d"
    with pytest.raises(CallError, match=r"aten\.mm has no overload 'no_such', but .*aten\.mm\.default"):
        ops_named("aten::mm.no_such", default_registry())


def _any(_op):
    return True


def _none(_op):
    return False


def test_one_overload_is_the_only_one_that_fits_or_the_default():
    both = [aten.add.Scalar, aten.add.Tensor]
    assert one_of("add", both[:1], _none) is aten.add.Scalar
    assert one_of("add", both, lambda op: op is aten.add.Tensor) is aten.add.Tensor
    assert one_of("sum", [aten.sum.dim_IntList, aten.sum.default], _any) is aten.sum.default
    with pytest.raises(
        CallError, match=r"several of its overloads fit the call. Name one of them:\n  aten.add.Scalar: "
    ):
        one_of("add", both, _any)
    with pytest.raises(CallError, match="none of its overloads fits"):
        one_of("add", both, _none)


# -- the commands ----------------------------------------------------------------------------------------------------

COMMANDS = {
    "why": (),
    "explain": ("--mesh", "2", "--input", "f32[6] S(0)", "--input", "f32[6] S(0)"),
    "infer": ("--sample", "f32[6], f32[6]"),
}
KERNELS = """
import torch
from shardwise.discovery.process import default_registry
from shardwise.rule import rule

@torch.library.custom_op("kernels_by_name::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by

@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)

default_registry().override(rule(scaled, "n, n -> n"))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels_by_name.py").write_text(KERNELS)
    return folder


def asked(command, name, *more):
    result = CliRunner().invoke(main, [command, name, *COMMANDS[command], "--json", *more])
    return result.exit_code, result.stdout, result.stderr


NAMES = (
    "scaled",
    "scaled.default",
    "kernels_by_name::scaled",
    "kernels_by_name.scaled",
    "kernels_by_name.scaled.default",
)


# One function reads names and imports for all commands, and to infer a rule takes as long as all the others do.
INFERRED_EVERY_DAY = ("scaled", "kernels_by_name"), ("kernels_by_name::scaled", "kernels_by_name.py")


def marks_of(name, module, command):
    every_day = command != "infer" or (name, module) in INFERRED_EVERY_DAY
    return () if every_day else (pytest.mark.slow, pytest.mark.sample)


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        pytest.param(*case, marks=marks_of(*case))
        for case in product(NAMES, ("kernels_by_name", "kernels_by_name.py"), COMMANDS)
    ],
)
def test_all_commands_take_the_same_names_and_imports(kernels, monkeypatch, command, name, module):
    monkeypatch.chdir(kernels)
    monkeypatch.syspath_prepend(str(kernels))
    code, printed, error = asked(command, name, "--import", module)
    assert code == 0, error
    content = json.loads(printed)
    assert (content if isinstance(content, dict) else content[0])["op"] == "kernels_by_name.scaled.default"


@pytest.mark.parametrize("name", ["softmx", "aten.softmx", "aten.mm.no_such", "no space"])
def test_all_commands_refuse_a_name_alike(name):
    answers = {asked(command, name) for command in COMMANDS}
    ((code, printed, error),) = answers
    assert code == 1
    assert json.loads(printed)["error"]["asked"] == f"find the op '{name}'"
    assert error.startswith(f"Error: CallError: find the op '{name}': ")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("no_such_module_at_all", "there is no module no_such_module_at_all"),
        ("no_such_file.py", "there is no file no_such_file.py"),
        ("raises.py", "cannot import raises.py: OSError: no libacme.so"),
    ],
)
def test_all_commands_refuse_an_import_alike(tmp_path, monkeypatch, module, words):
    (tmp_path / "raises.py").write_text("raise OSError('no libacme.so')")
    monkeypatch.chdir(tmp_path)
    answers = {asked(command, "mm", "--import", module) for command in COMMANDS}
    ((code, _, error),) = answers
    assert code == 1
    assert words in error


def test_an_op_that_a_file_defines_without_a_rule(tmp_path):
    path = tmp_path / "defined_by_name.py"
    path.write_text("import torch\ntorch.library.define('defined_by_name::once', '(Tensor x) -> Tensor')\n")
    for name in ("defined_by_name::once", "defined_by_name.once.default"):
        code, _, error = asked("why", name, "--import", str(path))
        assert (code, "no plugin has a rule for defined_by_name.once.default" in error) == (1, True)
