"""The documentation is that of the contracts as they are."""

from jaxinfer.contracts.page import PATH, pages


def test_the_page_is_up_to_date() -> None:
    told = "make it again: python -m jaxinfer.contracts.page"
    assert PATH.read_text(encoding="utf-8") == pages(), told
