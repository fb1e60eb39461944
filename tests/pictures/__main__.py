"""Draw the pictures of the pages: ``python tests/pictures`` writes docs/pictures/*.svg."""

from pathlib import Path

from all_pictures import PICTURES

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

for name, draw in PICTURES.items():
    (FOLDER / f"{name}.svg").write_text(draw().svg())
