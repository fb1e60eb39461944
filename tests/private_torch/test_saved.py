"""What a checkpoint's list of tensors names in its pickle."""

import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.private_torch.saved import MemoryFormat, StorageInfo, layout_named


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_list_names_these_at_their_places(tmp_path):
    dcp.save({"x": torch.ones(2), "v": 1}, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    metadata = pickle.loads(data)
    assert {type(place) for place in metadata.storage_data.values()} == {StorageInfo}
    texts = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    for named in (StorageInfo, MemoryFormat, layout_named):
        assert (named.__module__ in texts, named.__name__ in texts) == (True, True)


def test_a_layout_and_a_memory_format_by_what_the_list_has():
    assert layout_named("torch.strided") is torch.strided
    assert MemoryFormat(0) is MemoryFormat.TORCH_CONTIGUOUS_FORMAT
