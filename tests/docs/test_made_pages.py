"""The pages that are made from data are up to date."""

import pytest
from pages import PAGES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_up_to_date(path):
    assert path.read_text() == PAGES[path](), "run nox -s pages"
