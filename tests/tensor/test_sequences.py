"""Batches of sequences of several lengths: packed ones, CTC, and padded ones in torch's encoder."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardwise as sw
from shardwise import MeshTensor, Shard
from shardwise.errors import NoRuleError
from shardwise.testing import mesh

WORDS, BATCH, STEPS = 9, 4, 5
LENGTHS = [3, 5, 2, 1]


def on(full, *layout):
    return sw.distribute_tensor(full, mesh((2,)), layout or [Shard(0)])


def equal(found, wanted):
    torch.testing.assert_close(found.full_tensor() if isinstance(found, MeshTensor) else found, wanted)


class Tagger(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.recurrent = recurrent(4, 3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(6, 5)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.recurrent(packed)
        padded, _ = pad_packed_sequence(states, batch_first=True, padding_value=0.5)
        return self.out(padded)


def trains(recurrent, layout):
    torch.manual_seed(2)
    whole = Tagger(getattr(nn, recurrent)).double()
    placed = {name: [layout] for name, p in whole.named_parameters() if p.dim() > layout.dim}
    model = sw.distribute_module(copy.deepcopy(whole), mesh((2,)), placed)
    ids, classes, lengths = torch.randint(0, WORDS, (BATCH, STEPS)), torch.randint(0, 5, (BATCH, STEPS)), LENGTHS
    for net, data, target in ((whole, ids, classes), (model, on(ids), on(classes))):
        functional.cross_entropy(net(data, lengths).flatten(0, 1), target.flatten()).backward()
    for wanted, found in zip(whole.parameters(), model.parameters(), strict=True):
        equal(found.grad, wanted.grad)


def keeps_the_flags_of_one_dnn():
    one_dnn = import_module("torch.backends.mkldnn")  # by name: cloudpickle cannot pickle it
    flags = one_dnn.enabled, one_dnn.deterministic, one_dnn.fp32_precision
    with pytest.MonkeyPatch.context() as patch:
        # As importing torch.testing._internal.common_utils leaves it: an assignment to one_dnn.enabled raises.
        torchs = import_module("torch.backends").flags_frozen.__globals__
        patch.setitem(torchs, "__allow_nonbracketed_mutation_flag", False)
        with pytest.raises(RuntimeError, match="disable_global_flags"):
            one_dnn.enabled = False
        with one_dnn.flags(enabled=True, deterministic=True):
            trains("LSTM", Shard(0))
            assert (one_dnn.enabled, one_dnn.deterministic) == (True, True)
    assert (one_dnn.enabled, one_dnn.deterministic, one_dnn.fp32_precision) == flags


def test_a_recurrent_model_runs_where_torch_lets_nobody_set_its_flags(two_ranks):
    two_ranks.run(keeps_the_flags_of_one_dnn)


@pytest.mark.parametrize(
    ("recurrent", "layout"),
    [
        ("GRU", Shard(1)),
        pytest.param("LSTM", Shard(1), marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param("RNN", Shard(0), marks=[pytest.mark.slow, pytest.mark.sample]),
    ],
)
def test_a_recurrent_model_of_packed_sequences_trains_as_on_one_device(two_ranks, recurrent, layout):
    two_ranks.run(trains, recurrent, layout)


def compiles():
    torch.manual_seed(3)
    whole = nn.GRU(3, 4, batch_first=True).double()
    model, x = sw.distribute_module(copy.deepcopy(whole), mesh((2,))), torch.randn(BATCH, STEPS, 3, dtype=torch.float64)

    def run(net, data):
        return pad_packed_sequence(net(pack_padded_sequence(data, [5, 4, 2, 1], batch_first=True))[0])[0]

    found = torch.compile(run, backend="aot_eager")(model, on(x))
    equal(found, run(whole, x))
    found.sum().backward()


@pytest.mark.slow
def test_between_graphs_dynamo_leaves_the_dispatcher_alone(two_ranks):
    """Packing is a break in the graph. Dynamo compiled the comparison of its lengths, and the ranks hung."""
    two_ranks.run(compiles)


def packs():
    for x in (torch.randn(BATCH, STEPS), torch.arange(60).view(BATCH, STEPS, 3)):
        for lengths, lay in ((LENGTHS, None), (torch.tensor(LENGTHS), None), (torch.tensor(LENGTHS), on)):
            options = {"batch_first": True, "enforce_sorted": False}
            wanted = pack_padded_sequence(x, lengths, **options)
            found = pack_padded_sequence(on(x), lay(lengths) if lay else lengths, **options)
            equal(found.data, wanted.data)
            assert torch.equal(found.batch_sizes, wanted.batch_sizes)
            for total in (None, 7):
                pads = {"padding_value": -1.0, "total_length": total}
                for ours, theirs in zip(
                    pad_packed_sequence(found, **pads), pad_packed_sequence(wanted, **pads), strict=True
                ):
                    equal(ours, theirs)
    for wrong in ([1, 2, 3, 4], [5, 4, 2], [5, 4, 2, 0]):
        with pytest.raises(RuntimeError, match=r"lengths|Length"):
            pack_padded_sequence(on(x), wrong, batch_first=True)


def test_sequences_are_packed_and_padded(two_ranks):
    two_ranks.run(packs)


def alignments():
    torch.manual_seed(4)
    scores, classes = torch.randn(8, BATCH, 6, dtype=torch.float64), torch.randint(1, 6, (BATCH, 3))
    inputs, lengths = [8, 7, 2, 8], [3, 2, 0, 3]
    for reduction in ("mean", "sum", "none"):
        for data in (list, torch.tensor, lambda numbers: on(torch.tensor(numbers))):
            x, ours = scores.clone().requires_grad_(), on(scores, Shard(1)).requires_grad_()
            named = {"reduction": reduction, "zero_infinity": True}
            wanted = functional.ctc_loss(x.log_softmax(2), classes, inputs, lengths, **named)
            found = functional.ctc_loss(ours.log_softmax(2), on(classes), data(inputs), data(lengths), **named)
            equal(found, wanted)
            wanted.sum().backward()
            found.sum().backward()
            equal(ours.grad, x.grad)


def test_ctc_takes_lengths_in_any_form(two_ranks):
    two_ranks.run(alignments)


def padded_batches(norm_first, short):
    """As one device, which has zeros where the batch is padded, by way of a nested tensor."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first)
    whole = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4)).eval()
    model = sw.distribute_module(copy.deepcopy(whole), mesh((2,)), {"layers.0.linear1.*": Shard(0)})
    if short:  # without hooks a layer is one op
        for part in model.modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
    x, right = torch.randn(BATCH, STEPS, 4), torch.arange(STEPS) >= torch.tensor(LENGTHS)[:, None]
    for padding in (right, right.flip(1), right[:1].expand(BATCH, -1)):
        for scope in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with scope():
                equal(model(on(x), src_key_padding_mask=on(padding)), whole(x, src_key_padding_mask=padding))


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_padded_batch_in_an_encoder_that_infers(two_ranks, norm_first, short):
    two_ranks.run(padded_batches, norm_first, short)


class Sums(nn.TransformerEncoderLayer):
    """A layer that does more to its operand than torch's own."""

    def forward(self, src, **kwargs):
        return super().forward(src.cumsum(1), **kwargs)


class Joins(nn.TransformerEncoderLayer):
    """One that has its operand in a list."""

    def forward(self, src, **kwargs):
        return super().forward(torch.cat([src, src]), **kwargs)


def batch_for_another_layer(layer):
    model = nn.TransformerEncoder(layer(4, 2, 8, batch_first=True), 1).eval()
    model = sw.distribute_module(model, mesh((2,)))
    padding = torch.arange(STEPS) >= torch.tensor(LENGTHS)[:, None]
    with torch.no_grad(), pytest.raises(NoRuleError, match="enable_nested_tensor=False"):
        model(on(torch.randn(BATCH, STEPS, 4)), src_key_padding_mask=on(padding))


@pytest.mark.parametrize("layer", [Sums, Joins])
def test_other_ops_of_a_nested_tensor_are_refused_with_the_remedy(two_ranks, layer):
    two_ranks.run(batch_for_another_layer, layer)
