"""Draw the three forms of a ragged batch: `python docs/pictures/ragged.py` writes docs/images/ragged.svg."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

LENGTHS = (3, 1, 0, 5)
COLOURS = ("#4c78a8", "#e8853a", "#b0b0b0", "#4f9f5a")
SIDE = 30
GAP = 6
INK = "#333333"
PAD = "#ececec"


def text(x: float, y: float, words: str, size: int = 14, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{INK}" {style}>{words}</text>'


def cell(x: float, y: float, label: str, colour: str, ink: str = "white") -> str:
    middle = x + SIDE / 2
    return (
        f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{colour}" stroke="white" stroke-width="2"/>'
        f'<text x="{middle}" y="{y + 20}" font-size="13" text-anchor="middle" fill="{ink}">{label}</text>'
    )


def rows_of(item: int) -> range:
    end = list(accumulate(LENGTHS))[item]
    return range(end - LENGTHS[item] + 1, end + 1)


def title(x: float, y: float, name: str, call: str) -> list[str]:
    return [
        text(x, y, name, 17, style='font-weight="bold"'),
        text(x, y + 20, call, 13, style='font-family="monospace"'),
    ]


def listed(x: float, y: float) -> list[str]:
    """Four arrays of their own length."""
    parts = title(x, y, "list", "ragged.list()")
    for item, colour in enumerate(COLOURS):
        top = y + 40 + item * (SIDE + GAP)
        parts += [cell(x + place * SIDE, top, str(row), colour) for place, row in enumerate(rows_of(item))]
        if not LENGTHS[item]:
            parts.append(text(x + 2, top + 20, "(an empty item)", 13, style='font-style="italic"'))
    return parts


def padded(x: float, y: float) -> list[str]:
    """One row of equal width an item, and the lengths beside it."""
    parts = title(x, y, "padded", "ragged.padded()")
    width = max(LENGTHS)
    right = x + width * SIDE + 22
    parts.append(text(right + SIDE / 2, y + 32, "lengths", 12, "middle"))
    for item, colour in enumerate(COLOURS):
        top = y + 40 + item * SIDE
        rows = rows_of(item)
        parts += [cell(x + place * SIDE, top, str(row), colour) for place, row in enumerate(rows)]
        parts += [cell(x + place * SIDE, top, "0", PAD, "#999999") for place in range(len(rows), width)]
        parts.append(cell(right, top, str(len(rows)), "#f7f3e3", INK))
    return parts


def packed(x: float, y: float) -> list[str]:
    """All rows in one array, and the borders between the items below it."""
    parts = title(x, y, "packed", "ragged.packed()")
    top = y + 40
    place = 0
    for item, colour in enumerate(COLOURS):
        for row in rows_of(item):
            parts.append(cell(x + place * SIDE, top, str(row), colour))
            parts.append(text(x + (place + 0.5) * SIDE, top + SIDE + 56, str(item), 13, "middle"))
            place += 1
    parts.append(text(x + place * SIDE + 12, top + 20, "values", 13))
    offsets = [0, *accumulate(LENGTHS)]
    below = top + SIDE
    for border in sorted(set(offsets)):  # an empty item begins and ends at one border
        at = x + border * SIDE
        parts.append(f'<line x1="{at}" y1="{below + 2}" x2="{at}" y2="{below + 16}" stroke="{INK}"/>')
        parts.append(text(at, below + 32, ", ".join([str(border)] * offsets.count(border)), 13, "middle"))
    parts.append(text(x + place * SIDE + 12, below + 32, "offsets", 13))
    parts.append(text(x + place * SIDE + 12, below + 56, "item_of_value", 13))
    return parts


def picture() -> str:
    parts = [*listed(24, 40), *padded(234, 40), *packed(24, 264)]
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 470 410" width="470" height="410" '
        'font-family="Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Four items of lengths 3, 1, 0 and 5 in list, padded and packed form">\n'
        '<rect width="470" height="410" fill="white"/>\n'
        f"{body}\n</svg>\n"
    )


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "images" / "ragged.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(picture())
    print(f"wrote {target}")
