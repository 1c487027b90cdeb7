"""What the host was told of rows' last tokens is what the rows have, whatever happens to them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows

STEPS = st.lists(st.sampled_from(["append", "told", "several", "select", "reorder", "rewind"]), max_size=30)


@settings(max_examples=80)
@given(steps=STEPS, data=st.data())
def test_tokens_are_those_of_the_device(steps: list[str], data: st.DataObject) -> None:
    rows = Rows(Prompts(torch.arange(6).view(2, 3), [3, 3]), 0)
    texts = [[0, 1, 2], [3, 4, 5]]
    for number, step in enumerate(steps, 1):
        if step in ("append", "told"):
            tokens = [100 * number + place for place in range(len(texts))]
            rows.append(torch.tensor(tokens)[:, None])
            texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
            if step == "told":
                rows.note_last([[token] for token in tokens])
        elif step == "several":
            counts = data.draw(st.lists(st.integers(1, 3), min_size=len(texts), max_size=len(texts)))
            taken = [[100 * number + place for place in range(count)] for count in counts]
            filled = [own + [0] * (max(counts) - len(own)) for own in taken]
            rows.append(torch.tensor(filled), counts)
            rows.note_last(taken)
            texts = [text + own for text, own in zip(texts, taken, strict=True)]
        elif step in ("select", "reorder"):
            index = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=len(texts), max_size=len(texts)))
            if step == "reorder" and len(set(map(len, texts))) > 1:
                continue
            getattr(rows, step)(index)
            texts = [list(texts[place]) for place in index]
        else:
            texts = [text[: max(3, len(text) - 1)] for text in texts]
            rows.rewind([len(text) for text in texts])
        place = data.draw(st.integers(0, len(texts) - 1))
        first = data.draw(st.integers(0, len(texts[place])))
        assert rows.tokens_from(place, first) == texts[place][first:]
