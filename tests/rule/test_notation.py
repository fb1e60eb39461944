"""The einop notation: what it reads, what it prints, and the errors for what it does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import NotationError
from shardwise.rule.notation import Notation, Operand, parse, parse_operand

NAMES = st.text("abz_09", max_size=3).map("n".__add__)


@st.composite
def operands(draw):
    if draw(st.integers(0, 6)) == 0:
        return Operand(None)
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    dims = []
    while names:
        count = draw(st.integers(1, min(3, len(names))))
        group, names = names[:count], names[count:]
        dims.append(tuple(group) if count > 1 else group[0])
    for sign in draw(st.lists(st.sampled_from(["1", "_"]), max_size=2)) + ["..."] * draw(st.integers(0, 1)):
        dims.insert(draw(st.integers(0, len(dims))), sign)
    return Operand(tuple(dims))


NOTATIONS = st.builds(
    Notation, st.lists(operands(), min_size=1, max_size=3).map(tuple), st.lists(operands(), max_size=3).map(tuple)
)


@given(NOTATIONS)
def test_what_is_printed_reads_as_the_same(notation):
    assert parse(str(notation)) == notation


@given(NOTATIONS)
def test_blanks_do_not_matter(notation):
    loose = str(notation).replace(",", " ,  ").replace("(", " ( ").replace(")", " ) ").replace("->", "  ->  ")
    assert parse(loose) == notation


@given(st.text(alphabet="abk1_R.(),-> ", max_size=12))
def test_any_text_is_read_or_refused_with_the_text_in_the_message(text):
    try:
        calibrations = parse(text)
    except NotationError as error:
        refused = error
    else:
        assert parse(str(calibrations)) == calibrations
        return
    assert repr(text) in str(refused)
    assert refused.notation == text


GOLDEN = {
    "m k,k n->m n": "m k, k n -> m n",
    "..., ... -> ...": "..., ... -> ...",
    "b (h d), R -> b h d": "b (h d), R -> b h d",
    "a 1 _ -> a": "a 1 _ -> a",
    "() -> ()": "() -> ()",
    "...->...": "... -> ...",
    "a b ->": "a b -> ",
}


@pytest.mark.parametrize("text", GOLDEN)
def test_the_normal_form(text):
    assert str(parse(text)) == GOLDEN[text]


def test_the_parts_of_an_operand():
    operand = parse_operand("... (h d) 1 k _")
    assert operand.dims == ("...", ("h", "d"), "1", "k", "_")
    assert operand.names == ("h", "d", "k")
    assert operand.has_ellipsis
    assert parse_operand("R").dims is None
    assert parse_operand("()").dims == ()


@pytest.mark.parametrize(("text", "count"), [("", 0), ("a, b", 2), ("a -> b", 1)])
def test_one_operand_is_one_operand(text, count):
    with pytest.raises(NotationError, match=r"one operand|is not a dim") as refused:
        parse_operand(text)
    assert refused.value.notation == text
    assert refused.value.found in (f"it is {count} operands", "'->' is not a dim")


BAD = {
    "m k, k n": "'->' stands in it 0 times",
    "a -> b -> c": "'->' stands in it 2 times",
    "-> a": "it has no input",
    "a,, b -> a": "an operand is empty",
    "a a -> a": "'a' stands twice in one operand",
    "(a b) a -> a": "'a' stands twice in one operand",
    "... a ... -> a": "one operand has two '...'",
    "((a b) c) -> a": "compound dims are nested",
    "(a b -> a": "a '(' is not closed",
    "a) -> a": "a ')' closes nothing",
    "a R -> a": "'R' is not a dim",
    "M -> M": "'M' is not a dim",
    "a - b -> a": "'-' is not a dim",
    "(a 1) -> a": "'1' is not a dim",
    "2 -> a": "'2' is not a dim",
}


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_notation_says_what_is_wrong(text):
    with pytest.raises(NotationError) as refused:
        parse(text)
    assert refused.value.found == BAD[text]
    assert refused.value.notation == text
