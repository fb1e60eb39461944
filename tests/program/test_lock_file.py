"""The text of lockfiles: what is written is read, and what is no whole lockfile is refused by file and line."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CallError, LockFileError, LockFitError, LockVersionError
from shardwise.program.lock_changes import Budget, changes, difference_text, memory_changes, read_budget
from shardwise.program.lock_file import MEMORY, PHASES, Lock, Row, parse, read_lock
from shardwise.program.lock_patterns import collapsed, escaped, expanded, unescaped


def row(module, why="operand `mat2` is moved tp S(0) -> R", times=1, nbytes=1024, phase="forward", dims=("tp",)):
    return Row(phase, module, "aten.mm.default", "all_gather", dims, True, why, times, nbytes)


def lock_of(*rows, **others):
    values = {"program": "train.py:step", "mesh_names": ("dp", "tp"), "mesh_shape": (2, 4), "memory": {}}
    values |= {"device": "cpu", "plan": ""}
    return Lock(**{**values, **others}, rows=tuple(sorted(rows, key=lambda row: row.place)))


LAYERS = [row(f"blocks.{i}.wq", times=2, nbytes=2048) for i in range(12)]
LOCK = lock_of(*LAYERS, row("head"), row("head", phase="backward", dims=("dp", "tp")), memory={"kept": 4096})
TEXT = LOCK.text()

# Names that nobody should give, and some do.
WORDS = st.text(st.sampled_from("ab0.1 {}-,\\#\n\t\x00é\u2028[]:|"), max_size=8) | st.text(max_size=5)
PATHS = (
    st.lists(st.sampled_from(["blocks", "0", "1", "2", "10", "01", "w", "{0}", ""]), max_size=4).map(".".join) | WORDS
)


@st.composite
def locks(draw):
    names = draw(st.lists(WORDS.filter(bool), min_size=1, max_size=3, unique=True))
    rows = {}
    for _ in range(draw(st.integers(0, 8))):
        one = Row(
            draw(st.sampled_from(PHASES)),
            draw(PATHS),
            draw(WORDS),
            draw(WORDS.filter(bool)),
            tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))),
            draw(st.booleans()),
            draw(WORDS),
            draw(st.integers(1, 10**7)),
            draw(st.integers(0, 10**18)),
        )
        rows[one.key] = one
    memory = draw(st.dictionaries(st.sampled_from(MEMORY), st.integers(1, 10**15)))
    shape = tuple(draw(st.integers(1, 512)) for _ in names)
    texts = {"program": draw(WORDS), "device": draw(WORDS), "plan": draw(WORDS)}
    return lock_of(*rows.values(), mesh_names=tuple(names), mesh_shape=shape, memory=memory, **texts)


@given(WORDS, st.sampled_from(["", ",", "{}"]))
def test_a_word_has_no_gap_and_is_read_back(text, also):
    word = escaped(text, also)
    assert word
    assert unescaped(word) == text
    assert word == word.strip()
    assert "  " not in word
    assert len(word.splitlines()) == 1
    assert not set(also) & set(word)


@given(st.sets(PATHS))
def test_patterns_stand_for_exactly_their_modules(paths):
    patterns = collapsed(paths)
    back = [path for pattern in patterns for path in expanded(pattern)]
    assert sorted(back) == sorted(paths)
    assert collapsed(sorted(paths, reverse=True)) == patterns


def test_halves_of_characters_are_replaced():
    assert unescaped(escaped("a\udc80b")) == "a\ufffdb"


def test_a_small_file_does_not_stand_for_any_number_of_rows():
    line = next(line for line in TEXT.splitlines() if "wq" in line)
    many = [line.replace("{0-11}", "{0-99999}").replace("24 ", "100,000 ").replace("24,576", "100,000")]
    many = [many[0].replace("mat2", f"mat{i}") for i in range(3)]
    with pytest.raises(LockFileError, match="it stands for more than 200,000 rows"):
        parse(TEXT.replace(line, "\n".join(many)), "a.lock")


def test_layers_are_one_pattern():
    assert collapsed(f"blocks.{i}.{w}" for i in range(12) for w in ("q", "k")) == ["blocks.{0-11}.k", "blocks.{0-11}.q"]
    assert collapsed(["a.0.b.1", "a.0.b.2", "a.3.b.1", "a.3.b.2"]) == ["a.{0,3}.b.{1-2}"]
    assert collapsed(["a.0", "a.2", "a.3", "a.4", "a.x", "a.00"]) == ["a.00", "a.x", "a.{0,2-4}"]


@given(locks())
def test_what_is_written_is_read_in_whatever_order_rows_come_and_does_not_differ(lock):
    read = parse(lock.text(), "here")
    assert read == lock
    assert read.text() == lock.text()
    names = ("program", "mesh_names", "mesh_shape", "device", "plan", "memory")
    again = lock_of(*reversed(lock.rows), **{name: getattr(lock, name) for name in names})
    assert again == lock
    assert again.text() == lock.text()
    assert changes(lock, lock) == []
    assert memory_changes(lock, lock) == []
    assert list(difference_text(lock, lock)) == []


@given(locks(), locks())
def test_changes_account_for_every_byte(before, now):
    difference = sum(change.more for change in changes(before, now))
    assert difference == now.nbytes - before.nbytes


def test_repeated_layers_are_one_row():
    lines = [line for line in TEXT.splitlines() if "wq" in line]
    assert [line.split()[:5] for line in lines] == [["24", "24,576", "all_gather", "tp", "blocks.{0-11}.wq"]]


def test_a_longer_row_leaves_the_others_as_they_are():
    more = lock_of(*LOCK.rows, row("norm.one"), memory=LOCK.memory).text()
    assert set(TEXT.splitlines()[:-1]) <= set(more.splitlines())


def test_changes_are_told_apart():
    fewer = [evolve(r, nbytes=1024) for r in LAYERS]
    now = lock_of(*fewer[:6], *LAYERS[6:11], row("tail", times=3), evolve(row("head"), times=2, nbytes=4096))
    found = {(c.kind, c.row.module): (c.times, c.nbytes, c.row.times, c.row.nbytes) for c in changes(LOCK, now)}
    assert found == {
        ("added", "tail"): (0, 0, 3, 1024),
        ("grown", "head"): (1, 1024, 2, 4096),
        ("gone", "blocks.11.wq"): (2, 2048, 2, 2048),
        ("gone", "head"): (1, 1024, 1, 1024),
        ("shrunk", "blocks.{0-5}.wq"): (12, 12288, 12, 6144),
    }
    text = "\n".join(difference_text(evolve(parse(TEXT, "a.lock")), now, lambda _: "train.py:7"))
    assert "added:\n  forward all_gather over tp at tail: 3 x, 1.00 KiB | aten.mm.default | implicit: operand" in text
    assert "train.py:7" in text
    assert f"a.lock:{next(i for i, line in enumerate(TEXT.splitlines(), 1) if 'wq' in line)}" in text


# -- what is refused -------------------------------------------------------------------------------------------------


def edited(old, new):
    assert old in TEXT
    return TEXT.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("", 1, "not a lockfile"),
        ("{}\n", 1, "not a lockfile"),
        (edited("program  ", "programm "), 3, "has no 'program'"),
        (edited("dp 2, tp 4", "dp 2, tp x"), 4, "is not a mesh"),
        (edited("[backward]", "[sideways]"), 16, "'[sideways]' has no place"),
        (edited("[backward]", "[forward]"), 16, "'[forward]' has no place"),
        (edited("kept", "held"), 9, "not a figure of the memory"),
        (edited("blocks.{0-11}.wq", "blocks.{11-0}.wq"), 13, "not ascending"),
        (edited("blocks.{0-11}.wq", "blocks.{0-10}.wq"), 13, "not those of 11 modules"),
        (edited("blocks.{0-11}.wq", "blocks.{0-999999999}.wq"), 13, "more than 100,000 modules"),
        (edited("blocks.{0-11}.wq", "b.{0-9999}.{0-9999}"), 13, "stands for 100,000,000 modules"),
        (edited("operand `mat2`", "operand \\ud800"), 13, "does not stand for a character"),
        (edited("operand `mat2`", "operand \\Uffffffff"), 13, "does not stand for a character"),
        (edited("implicit", "innocent"), 13, "not a cause"),
        (edited("24,576", "24576"), 13, "not a number"),
        (edited("24,576", "24,588"), 22, "the end says"),
        (edited("  all_gather", "  all_gather  again"), 13, "9 columns"),
        (edited("[backward]", "<<<<<<< HEAD\n[backward]"), 16, "what a merge leaves where two versions differ"),
        (edited("[backward]", "[backward]\0"), 16, "has no place here"),
        (TEXT + "more\n", 23, "nothing follows the end"),
        (edited("operand `mat2`", "operand \\q"), 13, "does not stand for a character"),
    ],
)
def test_what_is_no_lockfile_is_refused_with_its_line(text, line, found):
    with pytest.raises(LockFileError, match=f"read the lockfile a.lock: line {line}: ") as raised:
        parse(text, "a.lock")
    assert found in raised.value.found
    assert (raised.value.path, raised.value.line) == ("a.lock", line)


@pytest.mark.parametrize(("version", "is_earlier"), [("3", False), ("1", True), ("0", False), ("x", False)])
def test_another_version_is_its_own_error(version, is_earlier):
    with pytest.raises(LockVersionError, match=f"version {version}, and this release reads version 2") as raised:
        parse(edited("version  2", f"version  {version}"), "a.lock")
    assert raised.value.is_earlier == is_earlier


def test_a_file_that_is_cut_short_anywhere_is_refused():
    for length in range(len(TEXT) - 1):
        with pytest.raises(LockFileError):
            parse(TEXT[:length], "a.lock")


@given(st.data())
def test_random_bytes_give_only_this_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("lock") / "a.lock"
    content = bytearray(TEXT.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    try:
        read = read_lock(path)
    except LockFileError as error:
        assert error.path == str(path)  # noqa: PT017  # whether it raises is not known before
    else:
        assert (read.times, read.nbytes) == (LOCK.times, LOCK.nbytes)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\x00" * 9])
def test_what_cannot_be_read_at_all_names_the_file(tmp_path, content):
    path = tmp_path / "a.lock"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LockFileError, match=r"a\.lock"):
        read_lock(path)


def test_lines_that_end_as_on_windows_are_read():
    assert parse(TEXT.replace("\n", "\r\n"), "") == LOCK


def test_a_mark_of_the_order_of_bytes_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "a.lock"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_lock(path) == LOCK


def test_another_mesh_device_or_program_is_refused():
    read = parse(TEXT, "a.lock")
    read.check_fits("compare", "train.py:step", ("dp", "tp"), (2, 4), "cpu")
    with pytest.raises(LockFitError, match=r"a.lock, line 4: it is of the mesh dp 2, tp 4, and this is dp 4, tp 2"):
        read.check_fits("compare", "train.py:step", ("dp", "tp"), (4, 2), "cpu")
    with pytest.raises(LockFitError, match=r"line 3: it is of the program train.py:step"):
        read.check_fits("compare", "other.py:step", ("dp", "tp"), (2, 4), "cpu")
    with pytest.raises(LockFitError, match=r"line 5: it is of the device cpu, and this is cuda"):
        read.check_fits("compare", "train.py:step", ("dp", "tp"), (2, 4), "cuda")


# -- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("tp forward 1GiB", 12 * 2048 + 1024),
        ("dp forward 1GiB", 0),
        ("dp * 1.5MiB", 1024),
        ("* backward 4096", 1024),
        ("* * 1 GiB", 12 * 2048 + 2048),
    ],
)
def test_a_budget_is_about_a_mesh_dim_and_a_phase(text, used):
    assert read_budget(text, ("dp", "tp")).used(LOCK) == used


def test_a_budget_that_is_exceeded_names_its_largest_rows():
    assert list(Budget("tp", "forward", 1 << 20).excess_text(LOCK)) == []
    head, first, _ = Budget("tp", "forward", 1024).excess_text(LOCK)
    assert head == "over the budget tp forward 1.00 KiB: 25.00 KiB, most of it from"
    assert "blocks.{0-11}.wq: 24 x, 24.00 KiB" in first


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tp forward", "2 words"),
        ("pp forward 1GiB", "'pp'"),
        ("tp onward 1GiB", "'onward'"),
        ("tp forward big", "'big'"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(text, found):
    with pytest.raises(CallError, match=found):
        read_budget(text, ("dp", "tp"))
