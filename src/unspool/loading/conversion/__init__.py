"""Models in other programs' formats, rewritten as folders in the hub's layout."""
