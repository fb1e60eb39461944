"""The pictures of the pages: each file is what the code draws, and some page shows it."""

import re
from xml.etree import ElementTree as ET

import pytest
from all_pictures import PICTURES
from svg_canvas import FILLS, INKS, Picture


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_code_draws(name, docs):
    file = docs.ROOT / "docs" / "pictures" / f"{name}.svg"
    drawn = PICTURES[name]().svg()
    assert ET.fromstring(drawn).tag.endswith("svg")  # noqa: S314  # our own text
    assert file.read_text() == drawn, "run nox -s pictures"


def test_every_picture_is_drawn_and_shown(docs):
    files = {path.stem for path in (docs.ROOT / "docs" / "pictures").glob("*.svg")}
    text = "".join(page.read_text() for page in docs.PAGES)
    shown = set(re.findall(r"!\[[^\]]{20,}\]\((?:\.\./)?pictures/([\w-]+)\.svg\)", text))
    assert files == set(PICTURES) == shown


def test_what_does_not_fit_is_an_error():
    picture = Picture(100, 100, "small")
    with pytest.raises(ValueError, match="outside"):
        picture.box(50, 50, 60, 10)
    with pytest.raises(ValueError, match="outside"):
        picture.text(60, 50, "runs over the border")
    with pytest.raises(ValueError, match="wide and has 30"):
        picture.text(0, 50, "too wide for this", size=10, room=30)


@pytest.mark.parametrize("scheme", [0, 1])
def test_words_can_be_read_on_every_fill(scheme):
    """WCAG asks for a contrast of 4.5 to 1 for text, and of 3 to 1 for what repeats something."""
    for fill, fills in FILLS.items():
        for ink, inks in INKS.items():
            if ink != "accent" or fill in ("card", "box"):  # accents stand on the card alone
                assert contrast(fills[scheme], inks[scheme]) >= (4.5 if ink == "ink" else 3), (fill, ink)


def contrast(one, other):
    """The contrast of two colours by WCAG 2.2."""
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
