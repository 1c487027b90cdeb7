"""The policy of pages in one file."""

from __future__ import annotations

from unspool.page_policy import build_policy


def test_what_stands_in_the_page_is_allowed_by_its_hash_and_nothing_else() -> None:
    empty = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"  # of no bytes, as FIPS 180-4 has it
    assert build_policy() == "default-src 'none'; base-uri 'none'; form-action 'none'"
    assert build_policy(scripts=[""], styles=["", ""], images="data:") == (
        f"default-src 'none'; script-src {empty}; style-src {empty} {empty}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
