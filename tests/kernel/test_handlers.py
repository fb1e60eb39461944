"""Handlers: the generated source reads as meant and keys exactly what a plan depends on."""

from __future__ import annotations

import torch

from shardwise.kernel.handlers import handler_source
from shardwise.kernel.schema import RuntimeSchemaInfo

aten = torch.ops.aten


AS_TUPLE = "tuple(a1) if type(a1) is list else freeze(a1)"


def key_line(op, positional, keywords=(), static=()):
    source = handler_source(op, positional, keywords, RuntimeSchemaInfo.of(op, frozenset(static)))
    compile(source, "<test>", "exec")
    return next(line.strip() for line in source.splitlines() if line.strip().startswith("key ="))


def test_tensors_are_keyed_by_spec():
    assert key_line(aten.mm.default, 2) == "key = (k0, k1,)"
    assert key_line(aten.t.default, 1) == "key = k0"


def test_scalars_are_keyed_by_type_unless_the_rule_needs_the_value():
    assert key_line(aten.mul.Scalar, 2) == "key = (k0, type(a1),)"
    by_value = "a1 if a1 and a1 == a1 else repr(a1)"
    assert key_line(aten.mul.Scalar, 2, static=["other"]) == f"key = (k0, type(a1), {by_value},)"


def test_int_lists_are_keyed_by_value():
    assert key_line(aten.view.default, 2) == f"key = (k0, {AS_TUPLE},)"


def test_keywords_are_read_by_name():
    source = handler_source(aten.sum.dim_IntList, 2, ("dtype",))
    assert "a3 = kwargs['dtype']" in source
    assert "if not kwargs or len(kwargs) != 1:" in source
    assert key_line(aten.sum.dim_IntList, 2, ("dtype",)) == f"key = (k0, {AS_TUPLE}, a3,)"


def test_in_place_and_out_ops_return_the_tensor_that_was_given():
    assert handler_source(aten.add_.Tensor, 2, ()).rstrip().endswith("return a0")
    assert handler_source(aten.add.out, 2, ("out",)).rstrip().endswith("return a3")


def test_several_results_are_wrapped_one_by_one():
    source = handler_source(aten.native_layer_norm.default, 5, ())
    assert "r0, r1, r2, = out" in source
    assert source.count("new(MT") == 3


def test_an_op_without_results_returns_none():
    assert handler_source(aten._foreach_add_.List, 2, ()).rstrip().endswith("return None")


def test_the_source_of_a_simple_op_reads_as_documented():
    assert handler_source(aten.neg.default, 1, ()) == (
        "# aten.neg.default, 1 positional, keywords ()\n"
        "def handle(cls, op, types, args=(), kwargs=None):\n"
        "    if kwargs:\n"
        "        return elsewhere(args, kwargs)\n"
        "    try:\n"
        "        a0, = args\n"
        "    except ValueError:\n"
        "        return elsewhere(args, kwargs)\n"
        "    if type(a0) is MT:\n"
        "        k0 = a0._spec; l0 = a0._local_tensor\n"
        "    elif type(a0) in PLAIN:\n"
        "        k0 = type(a0); l0 = a0\n"
        "    elif (known := known_tensors.get(id(a0))) is not None and known.tensor() is a0 "
        "and known.version == a0._version and known.address == a0.data_ptr():\n"
        "        k0 = known.key; l0 = a0\n"
        "    else:\n"
        "        k0, l0 = other('self', a0, args, kwargs)\n"
        "    try:\n"
        "        key = k0\n"
        "        try:\n"
        "            plan = plans[key]\n"
        "        except KeyError:\n"
        "            plan = miss(key, args, kwargs)\n"
        "        except TypeError:\n"
        "            plan = symbolic(args, kwargs)\n"
        "        call = plan.direct\n"
        "        if call is not None:\n"
        "            out = call(l0)\n"
        "        else:\n"
        "            if plan.redistributes is not None:\n"
        "                if plan.kept is not None and (kept := plan.kept.arguments(args, kwargs)) is not None:\n"
        "                    return on_kept(handle, kept)\n"
        "                guard(plan)\n"
        "                m0, = plan.redistributes\n"
        "                if m0 is not None:\n"
        "                    l0 = m0(l0, a0)\n"
        "            out = plan.call(l0)\n"
        "    except Exception as error:\n"
        "        raised(error)\n"
        "        raise\n"
        "    return new(MT, out, plan.out, False) if plan.out is not None else wrap_unknown(plan, out)\n"
    )
