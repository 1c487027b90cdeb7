"""Text stands out from what is behind it, in light and in dark: worked out from the style sheets, without a browser.

WCAG asks for 4.5 to 1, and 3 to 1 for the lines of fields. Held against the backgrounds of cards, of the page, and of
rows that are pointed at or chosen.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterator
from importlib.resources import files

import pytest

from unspool.explain.svg import build_style
from unspool.studio.files import read_assets
from unspool.studio.single_page import list_styles

Colour = tuple[float, float, float]
STUDIO = {name: read_assets()[name].content.decode() for name in list_styles()}
PAGE = files("unspool.explain").joinpath("page.css").read_text(encoding="utf-8")
THEMES = ("light", "dark")
# Rules whose elements lie on a tint of their own, beside those that say so themselves.
ON_CHOSEN = ("bar", "draft", "tried", "half", "beam", "chip", "mini", "tr.is", "muted", "soft", "eyebrow", "badge")
# What may be see-through: areas, lines, and what stands back while the mouse points at something else.
SEE_THROUGH = (".edge", ".ribbon", ".beam-tree.lit", ".picture.lit", ".bar{", "::placeholder", ".best .bar")


def read_colour(text: str) -> Colour:
    text = text.strip()
    if text.startswith("#"):
        full = text[1:] if len(text) == 7 else "".join(2 * one for one in text[1:])
        return (int(full[:2], 16), int(full[2:4], 16), int(full[4:], 16))
    hue, saturation, lightness = map(float, re.findall(r"[\d.]+", text))
    red, green, blue = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return (255 * red, 255 * green, 255 * blue)


def mix(front: Colour, back: Colour, share: float) -> Colour:
    red, green, blue = (one * share + other * (1 - share) for one, other in zip(front, back, strict=True))
    return (red, green, blue)


def measure_contrast(one: Colour, other: Colour) -> float:
    def luminance(colour: Colour) -> float:
        parts = [value / 255 for value in colour]
        red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def read_variables(theme: str) -> dict[str, Colour]:
    """The studio's colours by name."""
    colour = r"(?:hsl\([^)]*\)|#\w+)"
    found = re.findall(rf"--([\w-]+): light-dark\(({colour}), ({colour})\)", STUDIO["base.css"])
    assert len(found) > 25
    return {name: read_colour(light if theme == "light" else dark) for name, light, dark in found}


def list_rules(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Selectors and declarations, those within a media query too."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", text):
        pairs = (one.split(":", 1) for one in body.split(";") if ":" in one)
        yield selector.strip(), {name.strip(): value.strip() for name, value in pairs}


@pytest.mark.parametrize("theme", THEMES)
def test_text_of_every_rule_stands_out(theme: str) -> None:
    colours = read_variables(theme)
    seen = 0
    for name, sheet in STUDIO.items():
        for selector, rule in list_rules(sheet):
            used = re.fullmatch(r"var\(--([\w-]+)\)", rule.get("color", ""))
            if used is None and ("text" in selector or ".step-number" in selector or ".axis" in selector):
                used = re.fullmatch(r"var\(--([\w-]+)\)", rule.get("fill", ""))
            if used is None:
                continue
            own = re.fullmatch(r"var\(--([\w-]+)\)", rule.get("background", ""))
            backs = [own[1]] if own else ["card", "back", "raised"]
            if not own and any(word in selector for word in ON_CHOSEN):
                backs.append("accent-soft")
            if ".legend" in selector:  # of a card
                backs = ["card"]
            for back in backs:
                ratio = measure_contrast(colours[used[1]], colours[back])
                assert ratio >= 4.5, f"{name} {selector}: {used[1]} on {back} is {ratio:.2f} in {theme}"
                seen += 1
    assert seen > 60


@pytest.mark.parametrize("theme", THEMES)
def test_text_stands_out_from_every_tint(theme: str) -> None:
    colours = read_variables(theme)
    tint = re.compile(
        r"(?:hsl\(from var\(--([\w-]+)\) h s l / (\d+)%\)|color-mix\(in srgb, var\(--([\w-]+)\) (\d+)%,.*)"
    )
    seen = 0
    for sheet in STUDIO.values():
        for selector, rule in list_rules(sheet):
            found = tint.fullmatch(rule.get("background", ""))
            if found is None or selector.startswith((".gauge", ".funnel", ".meter")):
                continue
            behind = mix(colours[found[1] or found[3]], colours["card"], int(found[2] or found[4]) / 100)
            used = re.fullmatch(r"var\(--([\w-]+)\)", rule.get("color", "var(--ink)"))
            assert used and measure_contrast(colours[used[1]], behind) >= 4.5, (selector, theme)
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("theme", THEMES)
def test_fields_and_pictures_stand_out(theme: str) -> None:
    colours = read_variables(theme)
    fields = next(
        rule for selector, rule in list_rules(STUDIO["base.css"]) if "textarea" in selector and "border" in rule
    )
    line = re.search(r"var\(--([\w-]+)\)", fields["border"])
    assert line
    for name in (line[1], "raw", "kept", "warm", "cold", "greedy", *(f"c{at}" for at in range(8))):
        assert measure_contrast(colours[name], colours["card"]) >= 3, (name, theme)
    assert measure_contrast(colours["accent"], colours["back"]) >= 3  # the line around what has the focus


def test_no_text_is_see_through() -> None:
    for sheet in (*STUDIO.values(), PAGE, build_style()):
        for selector, rule in list_rules(sheet):
            if "opacity" in rule and float(rule["opacity"]) < 1:
                assert any(one in f"{selector}{{" for one in SEE_THROUGH), selector


def test_what_has_the_focus_is_shown() -> None:
    assert "outline: 2px solid var(--accent)" in STUDIO["base.css"].split(":focus-visible", 1)[1].split("}")[0]
    for sheet in STUDIO.values():
        assert not re.search(r"outline:\s*(none|0)", sheet)
    # The page of beams draws the line around the box of a node.
    assert PAGE.count("outline: none") == 1 and ".picture .node:focus-visible .box" in PAGE


# --- `unspool explain --html` -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("theme", THEMES)
def test_the_page_of_beams(theme: str) -> None:
    first, *others = re.findall(r":root \{([^}]*)\}", PAGE)
    declared = first if theme == "light" else others[0]
    names = {name: read_colour(value) for name, value in re.findall(r"--(\w+): (#\w+)", declared)}
    for text in ("ink", "soft", "best"):
        for back in ("card", "back"):
            assert measure_contrast(names[text], names[back]) >= 4.5, (text, back, theme)
    chosen = mix(names["best"], names["card"], 0.08)
    assert all(measure_contrast(names[one], chosen) >= 4.5 for one in ("ink", "soft", "best"))


@pytest.mark.parametrize("theme", THEMES)
def test_the_picture_of_beams(theme: str) -> None:
    style = build_style()
    light, dark = style.split("@media", 1)
    rules: dict[str, str] = {}
    for selectors, rule in list_rules(light if theme == "light" else dark.split("{", 1)[1].rsplit("}", 1)[0]):
        for selector in selectors.split(","):
            for name, value in rule.items():
                rules[f"{selector.strip()} {name}"] = value
    fill = {
        key.removesuffix(" fill"): read_colour(value)
        for key, value in rules.items()
        if key.endswith(" fill") and "#" in value
    }
    back = fill[".beams .back"]
    on = {
        ".beams text": [back, fill[".beams .box"], fill[".beams .good .box"], fill[".beams .best .box"]],
        ".beams .share": [back, fill[".beams .box"], fill[".beams .good .box"], fill[".beams .best .box"]],
        ".beams .step": [back],
        ".beams .drop text": [back],
        ".beams .more": [back],
        ".beams .score": [back],
        ".beams .first": [back],
        ".beams .prompt text": [fill[".beams .prompt rect"]],
        ".beams .badge text": [fill[f".beams {one}.badge rect"] for one in ("", ".good ", ".best ")],
    }
    for text, behind in on.items():
        for one in behind:
            assert measure_contrast(fill[text], one) >= 4.5, (text, one, theme, measure_contrast(fill[text], one))
