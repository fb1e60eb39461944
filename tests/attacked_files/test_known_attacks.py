"""Attacks on files that worked once, each by its name."""

import copyreg
import io
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mutations import watched
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import shardwise as sw
from shardwise import Shard, checkpoint
from shardwise.checkpoint.entries import load_entry
from shardwise.checkpoint.metadata_checks import _tile
from shardwise.checkpoint.metadata_pickle import load_metadata
from shardwise.discovery.frozen_rules import read_lock as read_rule_lock
from shardwise.errors import (
    CheckpointFileError,
    LinksFileError,
    LockError,
    LockFileError,
    PlacementError,
    PlanFileError,
)
from shardwise.kernel.placements import parse_placement
from shardwise.planning.link_file import MOST as MOST_LINKS
from shardwise.planning.link_file import parse as parse_links
from shardwise.planning.link_file import read as read_links
from shardwise.private_torch.saved import MemoryFormat
from shardwise.program.lock_file import parse as parse_lock
from shardwise.program.lock_file import read_lock
from shardwise.program.plan_file import parse as parse_plan
from shardwise.testing import mesh

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that torch wrote: nobody has its checksums."""
    path = tmp_path / "it"
    dcp.save({"x": torch.arange(4.0), "y": torch.ones(3), "v": ["a", 1]}, checkpoint_id=path)
    return path


def state():
    return {"x": torch.zeros(4), "y": torch.zeros(3), "v": None}


def refused(folder, match, **options):
    """The load is refused by that message, and the state is as it was."""
    into = state()
    with pytest.raises(CheckpointFileError, match=match) as raised, watched(folder):
        checkpoint.load(into, folder, **options)
    assert str(folder) in str(raised.value)
    assert not into["x"].any()
    assert not into["y"].any()
    assert into["v"] is None
    return raised.value


def relisted(folder, change):
    """The list of tensors, changed."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


# -- the list of tensors ---------------------------------------------------------------------------------------------


def test_a_far_place_in_the_pickles_memo_takes_no_memory(folder):
    # Python's unpickler makes room for all places before it: 32 GiB, each byte of it written.
    (folder / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\xff.")
    assert "holds a NoneType" in str(refused(folder, r"\.metadata"))


def test_nested_tuples_are_no_keys(folder):
    # The hash of a tuple that holds itself twice, sixty times over, takes thousands of years.
    bomb = b"\x80\x04})\x94" + b"".join(b"h%c\x86\x94" % k for k in range(60)) + b"Ns."
    (folder / ".metadata").write_bytes(bomb)
    refused(folder, "a tuple as a key")


def test_a_pickle_sets_no_attribute_of_a_class(folder):
    was = Metadata.__doc__
    poison = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x07__doc__\x8c\x03bad"
    (folder / ".metadata").write_bytes(poison + b"s\x86b.")
    refused(folder, "a state for a _Name")
    assert Metadata.__doc__ == was
    member = b"\x80\x04ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R}\x8c\x07_value_K\x07sb."
    (folder / ".metadata").write_bytes(member)
    refused(folder, "a state for a _MEM_FORMAT_ENCODING")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04cposix\nsystem\n\x8c\x04true\x85R.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"cbuiltins\ngetattr\n.",
        b"cbuiltins\ngetattr\nctorch\nSize\n\x8c\x09__class__\x86R.",
        b"cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n\x8c\x07__doc__\x86R.",
        b"cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x86R.",
        b"cbuiltins\ngetattr\n\x8c\x01a\x8c\x01b\x86R.",
        b"\x80\x04ctorch\nload\n.",
        b"\x80\x04ctorch\n__builtins__\n.",
        b"\x80\x04\x8d" + b"\xff" * 7 + b"\x0f" + b"a.",
        b"\x80\x04\x8a\xff.",
        b"\x80\x04Q.",
        b"\x80\x04" + b"(" * 1000 + b"t" * 1000,
        b"\x80\x04" + b"]\x94" + b"h\x00a" * 1000,
        b"",
    ],
)
def test_what_no_list_of_tensors_has_is_refused(data):
    with pytest.raises(pickle.UnpicklingError):
        load_metadata(data)


def test_lists_of_every_protocol_are_read(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert load_metadata(pickle.dumps(metadata, protocol)) == metadata


def test_members_of_enums_are_read_as_every_python_writes_them(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    kinds = {
        "3.11.0 to 3.11.3": lambda member: (getattr, (MemoryFormat, member.name)),
        "before and since": lambda member: (MemoryFormat, (member.value,)),
    }
    for how, reduce in kinds.items():
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            written = io.BytesIO()
            pickler = pickle.Pickler(written, protocol)
            pickler.dispatch_table = copyreg.dispatch_table | {MemoryFormat: reduce}
            pickler.dump(metadata)
            assert load_metadata(written.getvalue()) == metadata, (how, protocol)


def test_a_piece_that_is_missing_is_noticed(folder):
    # Torch leaves that part of the tensor as it was.
    def change(metadata):
        chunk = metadata.state_dict_metadata["x"].chunks[0]
        chunk.sizes = torch.Size((2,))

    relisted(folder, change)
    refused(folder, "1 pieces of 'x', which are not the whole tensor")


def test_a_huge_size_is_not_allocated(folder):
    def change(metadata):
        entry = metadata.state_dict_metadata["x"]
        entry.size = entry.chunks[0].sizes = torch.Size((1 << 60,))

    relisted(folder, change)
    refused(folder, "bytes for 'x', which takes 4611686018427387904")


def test_a_place_behind_the_end_of_its_file_is_noticed(folder):
    def change(metadata):
        metadata.storage_data[MetadataIndex("x", torch.Size((0,)))].offset = 1 << 60

    relisted(folder, change)
    refused(folder, "ends at byte")


@pytest.mark.parametrize(
    ("boxes", "is_whole"),
    [
        ([((0, 0), (4, 6))], True),
        ([((0, 0), (4, 3)), ((0, 3), (4, 3))], True),
        ([((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3)), ((4, 6), (0, 0))], True),
        ([((0, 0), (4, 3)), ((0, 2), (4, 3))], False),
        ([((0, 0), (4, 3)), ((0, 0), (4, 3))], False),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], False),
        ([((0, 0), (2, 6))], False),
        ([], False),
    ],
)
def test_pieces_are_a_whole_or_not(boxes, is_whole):
    assert _tile((4, 6), boxes) == is_whole
    filled = torch.zeros(4, 6)
    for offsets, sizes in boxes:
        filled[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert torch.equal(filled, torch.ones(4, 6)) == is_whole


def test_a_far_place_in_a_list_takes_no_memory(folder):
    relisted(folder, lambda metadata: metadata.planner_data.update(v=("v", 1 << 40)))
    refused(folder, "lists of 1099511627777 places in the state, for 3 values")


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_link_out_of_the_folder_is_not_followed(folder, name):
    secret = folder.parent / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    refused(folder, "outside of the folder")


def test_a_pipe_in_place_of_a_file_holds_nothing_up(tmp_path):
    saved = checkpoint.save({"x": torch.ones(4), "y": torch.ones(3), "v": 1}, tmp_path, step=1)
    (saved.path / "checkpoint.json").unlink()
    os.mkfifo(saved.path / "checkpoint.json")
    refused(saved.path, "it is not a file")


def test_a_lockfile_that_is_a_pipe_or_endless_is_not_read(tmp_path):
    pipe, endless = tmp_path / "pipe.lock", tmp_path / "endless.lock"
    os.mkfifo(pipe)
    with endless.open("wb") as file:
        file.truncate(1 << 40)
    for path, why in ((pipe, "it is not a file"), (endless, "has more than"), (tmp_path, "Is a directory")):
        with pytest.raises(LockFileError, match=why):
            read_lock(path)


def test_a_lockfile_with_a_number_of_many_digits_is_a_message_of_few():
    text = (Path(__file__).parents[1] / "tools/locks/demo.lock").read_text()
    for damaged in (
        text.replace("{0-", "{" + "9" * 5000 + "-", 1),
        text.replace("version  2", "version  " + "1" * 5000),
    ):
        assert damaged != text
        with pytest.raises(LockFileError) as raised:
            parse_lock(damaged, "communication.lock")
        assert len(str(raised.value)) < 1000


def test_a_bit_that_has_flipped_in_what_torch_wrote_is_noticed(folder):
    """``torch.save`` writes a checksum for each record, unless it is told not to; ``torch.load`` looks at none."""
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    at = whole.index(torch.arange(4.0).numpy().tobytes())
    for offset in (0, 3, 15):
        damaged = bytearray(whole)
        damaged[at + offset] ^= 1
        file.write_bytes(damaged)
        refused(folder, "its checksum differs")
    into = state()
    checkpoint.load(into, folder, verify=False)
    assert into["x"][-1] != 3
    file.write_bytes(whole)
    checkpoint.load(into, folder)
    assert into["x"].tolist() == [0, 1, 2, 3]


def test_what_torch_wrote_without_checksums_is_loaded(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"x": torch.arange(4.0)}, checkpoint_id=tmp_path / "it")
    finally:
        torch.serialization.set_crc32_options(True)
    into = {"x": torch.zeros(4)}
    checkpoint.load(into, tmp_path / "it")
    assert into["x"].tolist() == [0, 1, 2, 3]


def test_saving_removes_the_name_of_a_linked_checkpoint_and_not_what_it_leads_to(tmp_path):
    elsewhere = checkpoint.save({"n": 1}, tmp_path / "other", step=1).path
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(elsewhere)
    (tmp_path / "run" / "step-00000000").write_text("a file")
    checkpoint.save({"n": 2}, tmp_path / "run", step=2, keep=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
    checkpoint.load(back := {"n": 0}, elsewhere)
    assert back == {"n": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 1, "format": 1}', "twice"),
        ('{"a":' * 50_000, "nested too deeply"),
        ('{"format": 1, "files": {"x": [1, NaN]}}', "NaN"),
        ('{"format": 1, "files": {"x": "ab"}}', "no size and checksum"),
        ('{"format": 1, "files": [["x", 1]]}', "its files are a list"),
        ('{"format": 1, "files": {"a\\u0000b": [1, 1]}}', "outside of the folder"),
        ('{"format": 1, "files": {"%s": [1, 1]}}' % ("x" * 5000), "name too long"),
        ("[]", "checkpoint.json"),
    ],
    ids=lambda text: text[:40],
)
def test_a_list_of_files_that_is_not_one_is_an_error_with_its_name(tmp_path, text, why):
    saved = checkpoint.save({"x": torch.ones(4), "y": torch.ones(3), "v": 1}, tmp_path, step=1)
    (saved.path / "checkpoint.json").write_text(text)
    for options in ({}, {"verify": False}):
        error = refused(saved.path, why, **options)
        assert "checkpoint.json" in str(error)


# -- entries -------------------------------------------------------------------------------------------------------


def rewritten(change, compression=zipfile.ZIP_STORED):
    """What ``torch.save`` writes, with records that were changed."""
    buffer, out = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(4.0), buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(out, "w", compression) as new:
        for record in archive.infolist():
            new.writestr(record.filename, change(record.filename, archive.read(record)))
    out.seek(0)
    return out


def test_an_entry_is_read():
    assert torch.equal(load_entry(rewritten(lambda _, data: data)), torch.arange(4.0))


def test_an_entry_that_claims_more_than_is_stored_reads_no_memory():
    # Torch compares it with the record, in releases that do; before, a tensor lay over whatever is behind the record.
    def change(name, data):
        if not name.endswith("data.pkl"):
            return data
        return data.replace(b"K\x04tq", b"M\xff\x7ftq").replace(b"K\x04\x85", b"M\xff\x7f\x85")

    with pytest.raises((ValueError, RuntimeError), match=r"claims 131068 bytes|does not match expected size"):
        load_entry(rewritten_tensor(change))


def rewritten_tensor(change):
    entry = rewritten(change)
    with zipfile.ZipFile(entry) as archive:
        assert any(b"M\xff\x7f" in archive.read(record) for record in archive.infolist()), "the pickle is another one"
    entry.seek(0)
    return entry


def test_a_compressed_entry_is_refused():
    grown = rewritten(lambda name, data: bytes(1 << 24) if "data/0" in name else data, zipfile.ZIP_DEFLATED)
    assert len(grown.getvalue()) < 1 << 16
    with pytest.raises(ValueError, match="is compressed"):
        load_entry(grown)


# -- all or nothing ------------------------------------------------------------------------------------------------


def test_a_model_is_not_loaded_in_part(tmp_path):
    # The second of two entries is damaged; the first was in the model already, once.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    dcp.save({"model": model.state_dict(), "n": 1}, checkpoint_id=tmp_path / "it")
    metadata = load_metadata((tmp_path / "it/.metadata").read_bytes())
    last = max(metadata.storage_data.values(), key=lambda place: place.offset)
    path = tmp_path / "it" / last.relative_path
    data = bytearray(path.read_bytes())
    data[last.offset : last.offset + 8] = b"\xff" * 8
    path.write_bytes(data)
    into = {"model": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "n": 0}
    before = {name: p.clone() for name, p in into["model"].state_dict().items()}
    with pytest.raises(CheckpointFileError, match=last.relative_path):
        checkpoint.load(into, tmp_path / "it")
    assert all(torch.equal(p, before[name]) for name, p in into["model"].state_dict().items())
    assert into["n"] == 0


def one_rank_meets_damage(directory):
    """The file with rank 1's part is damaged: rank 0 reads its own without an error, and must not keep it."""
    where = mesh((dist.get_world_size(),))
    whole = torch.arange(1024.0).reshape(4, 256)
    sharded = sw.distribute_tensor(whole, where, [Shard(0)], src_data_rank=None)
    saved = checkpoint.save({"x": sharded}, directory, step=1)
    dist.barrier()
    if dist.get_rank() == 1:
        path = next(saved.path.glob("__1_*.distcp"))
        data = bytearray(path.read_bytes())
        data[: len(data) // 2] = bytes(len(data) // 2)
        path.write_bytes(data)
    dist.barrier()
    errors = []
    for verify in (True, False):
        into = {"x": sw.distribute_tensor(torch.zeros(4, 256), where, [Shard(0)], src_data_rank=None)}
        with pytest.raises(CheckpointFileError) as raised:
            checkpoint.load(into, directory, verify=verify)
        assert not into["x"].to_local().any()
        errors.append((str(raised.value), raised.value.file))
    return errors


@pytest.mark.slow
@pytest.mark.sample
def test_damage_in_the_file_of_one_rank_is_an_error_of_all(ranks, tmp_path):
    errors = ranks.run(one_rank_meets_damage, tmp_path)
    assert all(of_rank == errors[0] for of_rank in errors)
    assert [file for _, file in errors[0]] == ["__1_0.distcp"] * 2


# -- texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["S(²)", "S(" + "9" * 5000 + ")", "_S(1, ²)", "S(٣)"])
def test_digits_that_are_none_are_no_placement(text):
    with pytest.raises(PlacementError):
        parse_placement(text)


# Python prints no number of so many digits, and reads one in hexadecimal.
UNPRINTABLE = "0x" + "f" * 5000


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 50_000,
        "version = " + "9" * 5000,
        "a = 1\na = 1",
        "version = true",
        f"version = {UNPRINTABLE}",
        f"version = [{UNPRINTABLE}]",
    ],
)
def test_a_plan_that_is_nested_or_numbered_beyond_reading(text):
    with pytest.raises(PlanFileError, match=r"gpt\.plan"):
        parse_plan(text, "gpt.plan")


@pytest.mark.parametrize("key", ["program", "mesh", "figures", "at", "times", "to"])
def test_a_number_that_cannot_be_printed_in_any_place_of_a_plan(key):
    path = Path(__file__).parents[1] / "benchmarks/plans/unet-positions-dp-tp.plan"
    text, count = re.subn(rf"^{key} = .*$", f"{key} = {{ a = {UNPRINTABLE} }}", path.read_text(), flags=re.MULTILINE)
    assert count
    with pytest.raises(PlanFileError, match=r"gpt\.plan.* 64 bits"):
        parse_plan(text, "gpt.plan")


@pytest.mark.parametrize("version", [UNPRINTABLE, f"{{ a = [{UNPRINTABLE}] }}", str(1 << 63)])
def test_a_lock_of_rules_with_a_number_of_too_many_bits(tmp_path, version):
    path = tmp_path / "rules.lock"
    path.write_text(f"version = {version}\n")
    with pytest.raises(LockError, match=r"rules\.lock.* 64 bits"):
        read_rule_lock(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"version": 2, "version": 2, "meshes": []}',
        '{"version": 2, "meshes": [], "more": 1}',
        '{"version": 2, "meshes": {}}',
        '{"version": 2, "meshes": ""}',
    ],
)
def test_links_that_are_nested_or_there_twice(text):
    with pytest.raises(LinksFileError, match=r"links\.json"):
        parse_links(text, "links.json")


def test_figures_that_were_changed_are_noticed():
    text = '{"version": 2, "digest": "0123456789abcdef", "meshes": []}'
    with pytest.raises(LinksFileError, match="were changed after they were written"):
        parse_links(text, "links.json")
    assert parse_links('{"version": 2, "meshes": []}', "links.json") == ()


def test_an_endless_file_is_not_read(tmp_path):
    path = tmp_path / "links.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room on the disk
    with pytest.raises(LinksFileError, match="has more than"):
        read_links(path)


def test_a_file_of_figures_that_is_larger_than_any_is_not_read(tmp_path):
    """Its text goes to all ranks: one of 100 MB took minutes and tens of GB on each."""
    path = tmp_path / "links.json"
    path.write_bytes(bytes(MOST_LINKS + 1))
    with pytest.raises(LinksFileError, match=r"links\.json.*has more than"):
        read_links(path)


@pytest.mark.parametrize("text", ["S(0", "S(0))", "S0)", "P(sum", "P(", "P)", "_S(0, 2", "S(1)(", "R)", "R("])
def test_a_placement_that_is_cut_short_is_none(text):
    with pytest.raises(PlacementError):
        parse_placement(text)
