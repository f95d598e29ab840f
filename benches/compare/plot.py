"""Bars with their spread as SVG, without any library."""
from xml.sax.saxutils import escape

WIDTH, LABEL, BAR, GAP, TOP = 900, 330, 18, 6, 34
OURS, OTHERS = "#2f6f4f", "#9aa5b1"


def bars(title, unit, blocks):
    """An SVG of blocks of bars: `blocks` is [(name, [(label, median, low, high)])]. The longest bar of a block fills
    the width: blocks are not to one scale."""
    height = TOP + sum(TOP + len(rows) * (BAR + GAP) for _, rows in blocks) + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
           f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
           text(10, 22, f"{title} ({unit})", size=16, weight="bold")]
    y = TOP
    for name, rows in blocks:
        out.append(text(10, y + 22, name, weight="bold"))
        y += TOP
        top = max([row[3] for row in rows], default=0) or 1
        for label, median, low, high in rows:
            out += bar(y, label, median, low, high, (WIDTH - LABEL - 90) / top)
            y += BAR + GAP
    return "\n".join([*out, "</svg>", ""])


def bar(y, label, median, low, high, scale):
    middle, end = y + BAR / 2, LABEL + median * scale
    color = OURS if label.startswith("longhorn") else OTHERS
    return [
        text(LABEL - 8, y + BAR - 5, label, anchor="end"),
        f'<rect x="{LABEL}" y="{y}" width="{median * scale:.1f}" height="{BAR}" fill="{color}"/>',
        f'<path d="M{LABEL + low * scale:.1f} {middle}H{LABEL + high * scale:.1f}" stroke="black"/>',
        text(max(end, LABEL + high * scale) + 6, y + BAR - 5, number(median)),
    ]


def number(n):
    return f"{n:,.0f}" if n >= 100 else f"{n:.1f}"


def text(x, y, words, anchor="start", size=12, weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
            f"{escape(words)}</text>")
