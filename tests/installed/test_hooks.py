"""The rare hooks: what moves cost, and watching dispatches; and that neither they nor pluggy stand on the hot path."""

import pytest

pytestmark = pytest.mark.slow  # environments take seconds each: .ci/run takes those that are marked

LINKS = """
    from shardwise.planning.cost import Link, Links
    from shardwise.hookspecs import hookimpl

    @hookimpl
    def shardwise_register(registry): ...

    @hookimpl
    def shardwise_links({arguments}):
        return {answer}
"""
COSTS = """
    import json
    from shardwise.planning.cost import links_of
    from shardwise.discovery.process import default_registry
    from shardwise.rule import AbstractMesh
    default_registry()
    print(json.dumps([[c.all_gather.start for c in links_of(AbstractMesh(s, d)).mesh_dims]
                      for s, d in (((2, 4), "cpu"), ((2,), "cuda"))]))
"""
START = """
    import json, sys, torch
    import torch.distributed as dist
    import shardwise as sw
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = sw.ones(3, device_mesh=init_device_mesh("cpu", (1,)))
"""


def test_a_plugin_says_what_moves_cost_and_the_first_by_name_that_answers_counts(environment, wheel):
    slow = "Links((Link(1.0, 1.0, 1.0),) * len(mesh_shape), 1.0, 1.0) if device_type == 'cpu' else None"
    slower = "Links((Link(2.0, 1.0, 1.0),) * len(mesh_shape), 1.0, 1.0) if wires[0] == 'nvlink' else None"
    env = environment(
        wheel("acme-links", LINKS.format(arguments="device_type, mesh_shape", answer=slow)),
        wheel("bolt-links", LINKS.format(arguments="mesh_shape, device_type, wires", answer=slower)),
    )
    assert env.answer(COSTS) == [[1.0, 1.0], [2.0]]
    default = env.answer(COSTS, SHARDWISE_PLUGINS="")
    assert default != [[1.0, 1.0], [2.0]]


def test_an_answer_that_is_no_links_is_an_error_that_names_the_plugin(environment, wheel):
    done = environment(wheel("acme-links", LINKS.format(arguments="", answer="3"))).run(COSTS)
    assert "PluginLoadError: cost redistributions on a mesh of shape (2, 4) by the plugin acme-links 1.0" in done.stderr
    assert "answers 3" in done.stderr


@pytest.mark.sample
def test_a_plugin_sees_every_dispatch(environment, wheel):
    source = """
        from shardwise.hookspecs import hookimpl

        seen = []

        @hookimpl
        def shardwise_register(registry): ...

        @hookimpl
        def shardwise_dispatched(plan):
            seen.append(str(plan.schema.op))
    """
    code = (
        START
        + """
    for _ in range(3):
        torch.relu(x + x)
    import acme_watch_plugin
    print(json.dumps(acme_watch_plugin.seen))
    dist.destroy_process_group()
    """
    )
    assert environment(wheel("acme-watch", source)).answer(code) == ["aten.add.Tensor", "aten.relu.default"] * 3


def test_what_a_hook_that_watches_raises_names_the_plugin(environment, wheel):
    source = """
        from shardwise.hookspecs import hookimpl

        @hookimpl
        def shardwise_register(registry): ...

        @hookimpl
        def shardwise_dispatched(plan):
            raise KeyError("no such metric")
    """
    done = environment(wheel("acme-watch", source)).run(START + "    x + x\n")
    assert "PluginLoadError: tell the plugin acme-watch 1.0 of a call of aten.add.Tensor" in done.stderr
    assert "its hook shardwise_dispatched raised KeyError: 'no such metric'" in done.stderr


@pytest.mark.sample
def test_neither_pluggy_nor_a_plugin_is_on_the_hot_path(environment, wheel):
    code = (
        START
        + """
    y = x.reshape(3, 1) * sw.ones(1, 3, device_mesh=x.device_mesh)

    def step():
        return torch.relu(y @ y + y.sum())
    step()
    entered = set()
    sys.setprofile(lambda frame, event, _: entered.add(frame.f_code.co_filename))
    step()
    sys.setprofile(None)
    print(json.dumps(sorted(entered)))
    dist.destroy_process_group()
    """
    )
    entered = environment(wheel("acme-kernels")).answer(code)
    # The functions that were written for these ops, the constructor of tensors, and nothing else of ours.
    assert any("shardwise handler of aten.mm" in name for name in entered)
    entered = [name for name in entered if "shardwise handler" not in name]
    assert [name for name in entered if any(word in name for word in ("pluggy", "shardwise", "acme"))] == []
