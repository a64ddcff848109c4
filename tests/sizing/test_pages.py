"""Tables of the pages are those of the code: `python -m tests.sizing.pages` writes them anew."""

import pytest

from tests.sizing.pages import PAGES, TABLES, blocks

FOUND = {name: text for page in PAGES for name, text in blocks(page).items()}


def test_every_table_stands_on_a_page():
    assert FOUND.keys() >= TABLES.keys()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_code(name):
    assert FOUND[name] == TABLES[name]()
