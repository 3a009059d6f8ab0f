"""Charts as inline SVG: pure functions of numbers, no style of their own (page.css has it), no script.

Horizontal positions are percentages and vertical ones pixels, without a viewBox: a chart fills any width, from a phone to
paper, while its text keeps its size. Every value that enters the markup passes through `tag`, which escapes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from dflash_mini_lab.report.format import is_number

LANE = 34  # height of one lane of a horizontal chart, px


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An element; `class_` stands for class and `x_y` for x-y. Content is escaped unless it is Markup already."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(escape(item) for item in content)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, inside)


def figure(
    ident: str, title: str, description: str, height: int, *shapes: Markup, class_: str = "chart", **attributes: str
) -> Markup:
    """An SVG that a screen reader announces by its title and description."""
    return tag(
        "svg",
        tag("title", title, id=f"{ident}-title"),
        tag("desc", description, id=f"{ident}-desc"),
        *shapes,
        class_=class_,
        role="img",
        width="100%",
        height=height,
        aria_labelledby=f"{ident}-title",
        aria_describedby=f"{ident}-desc",
        **attributes,
    )


def at(value: float, top: float) -> str:
    """A position on a scale from zero to `top`, as the percentage that SVG takes."""
    return f"{100 * min(max(value / top, 0.0), 1.0):.2f}%"


def scale_top(values: Sequence[object], least: float = 1.0, headroom: float = 1.06) -> float:
    """The end of a scale that starts at zero and holds every number among the values."""
    return max([least, *(float(value) for value in values if is_number(value))]) * headroom


def ticks(top: float, wanted: int = 5) -> list[float]:
    """Round numbers from zero up to `top`, about as many as wanted."""
    raw = top / wanted
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    return [round(step * index, 10) for index in range(int(top / step + 1e-9) + 1)]


def axis(top: float, unit: str = "") -> Markup:
    """The scale under a stack of lanes; decoration, since each lane says its numbers in words."""
    labels = [
        tag(
            "text",
            f"{tick:g}{unit}",
            x=at(tick, top),
            y=14,
            text_anchor="start" if tick == 0 else "end" if tick > 0.95 * top else "middle",
        )
        for tick in ticks(top)
    ]
    return tag("svg", *labels, class_="chart axis", width="100%", height=20, aria_hidden="true")


def bar_lane(
    ident: str,
    title: str,
    description: str,
    top: float,
    mean: float | None,
    low: float | None,
    high: float | None,
    floor: tuple[float, float] | None,
    quiet: bool = False,
) -> Markup:
    """A speed-up as a bar with its interval, over the noise floor's band and the line at 1×."""
    shapes = [] if floor is None else [_between("floor", floor[0], floor[1], top, 0, LANE)]
    shapes.append(tag("line", class_="one", x1=at(1, top), x2=at(1, top), y1=0, y2=LANE))
    if is_number(mean):
        shapes.append(tag("rect", class_="bar quiet" if quiet else "bar", x=0, y=9, width=at(mean, top), height=LANE - 18, rx=2))
    if is_number(low) and is_number(high):
        middle = LANE / 2
        shapes += [tag("line", class_="whisker", x1=at(low, top), x2=at(high, top), y1=middle, y2=middle)]
        shapes += [
            tag("line", class_="whisker", x1=at(end, top), x2=at(end, top), y1=middle - 6, y2=middle + 6) for end in (low, high)
        ]
    return figure(ident, title, description, LANE, *shapes, class_="chart lane")


def stack_lane(ident: str, title: str, description: str, top: float, parts: Sequence[tuple[str, float]]) -> Markup:
    """Parts of a whole, one after the other: (class, length) each."""
    shapes, start = [], 0.0
    for name, length in parts:
        shapes.append(_between(f"part {name}", start, start + length, top, 7, LANE - 14))
        start += length
    return figure(ident, title, description, LANE, *shapes, class_="chart lane")


def range_lane(ident: str, title: str, description: str, top: float, needed: float, reached: float) -> Markup:
    """What is needed (a bar across the lane) against what was reached (a dot), joined; the dot is filled when it is enough."""
    middle = LANE / 2
    enough = reached >= needed
    low, high = sorted((needed, reached))
    return figure(
        ident,
        title,
        description,
        LANE,
        tag("line", class_="rail", x1=0, x2="100%", y1=middle, y2=middle),
        tag("line", class_="gain" if enough else "loss", x1=at(low, top), x2=at(high, top), y1=middle, y2=middle),
        tag("line", class_="needed", x1=at(needed, top), x2=at(needed, top), y1=middle - 9, y2=middle + 9),
        tag("circle", class_="dot" if enough else "dot hollow", cx=at(reached, top), cy=middle, r=6),
        class_="chart lane",
    )


def trials_lane(
    ident: str, title: str, description: str, top: float, speeds: Sequence[object], chosen: object, expected: object = None
) -> Markup:
    """What was tried, a hollow dot each; the filled dot was chosen, the bar across the lane is what a model would choose."""
    middle = LANE / 2
    shapes = [tag("line", class_="rail", x1=0, x2="100%", y1=middle, y2=middle)]
    if is_number(expected):
        shapes.append(tag("line", class_="needed", x1=at(expected, top), x2=at(expected, top), y1=middle - 9, y2=middle + 9))
    shapes += [tag("circle", class_="dot hollow", cx=at(speed, top), cy=middle, r=4) for speed in speeds if is_number(speed)]
    if is_number(chosen):
        shapes.append(tag("circle", class_="dot", cx=at(chosen, top), cy=middle, r=6))
    return figure(ident, title, description, LANE, *shapes, class_="chart lane")


def slot_chart(ident: str, title: str, description: str, joint: Sequence[float], conditional: Sequence[float]) -> Markup:
    """Acceptance by slot: joint as columns, conditional as linked dots."""
    height = 150
    plot = height - 22
    count = max(len(joint), len(conditional), 1)
    centre = [f"{100 * (slot + 0.5) / count:.2f}%" for slot in range(count)]
    level = [plot - share * (plot - 8) if is_number(share) else None for share in conditional]
    shapes = [_grid(plot - share * (plot - 8), f"{share:.0%}") for share in (0.0, 0.5, 1.0)]
    shapes += [_column("column", slot, count, share, plot) for slot, share in enumerate(joint) if is_number(share)]
    shapes += [
        tag("line", class_="link", x1=centre[slot], x2=centre[slot + 1], y1=f"{left:.1f}", y2=f"{right:.1f}")
        for slot, (left, right) in enumerate(itertools.pairwise(level))
        if left is not None and right is not None
    ]
    shapes += [
        tag("circle", class_="dot hollow", cx=centre[slot], cy=f"{y:.1f}", r=4) for slot, y in enumerate(level) if y is not None
    ]
    shapes += [tag("text", str(slot + 1), x=centre[slot], y=height - 5, text_anchor="middle") for slot in range(count)]
    return figure(ident, title, description, height, *shapes)


def histogram(ident: str, title: str, description: str, shares: Sequence[float]) -> Markup:
    """How many drafts a round accepts, 0 first, as shares of all rounds."""
    height = 150
    plot = height - 22
    top = max([0.01, *shares])
    count = max(len(shares), 1)
    shapes = [_grid(plot, "")]
    for accepted, share in enumerate(shares):
        centre = f"{100 * (accepted + 0.5) / count:.2f}%"
        shapes += [
            _column("column", accepted, count, share / top * 0.86, plot),
            tag("text", f"{share:.0%}", x=centre, y=f"{plot - share / top * 0.86 * (plot - 8) - 5:.1f}", text_anchor="middle"),
            tag("text", str(accepted), x=centre, y=height - 5, text_anchor="middle"),
        ]
    return figure(ident, title, description, height, *shapes)


def cost_curve(
    ident: str,
    title: str,
    description: str,
    rows: Sequence[int],
    ratio: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    method: tuple[int, float, float] | None,
) -> Markup:
    """v(W) with the spread of its measurements, the line where W rows cost W calls, and one method's
    (width, break-even τ, reached τ)."""
    height = 270
    plot = height - 26
    widest = max(rows)
    top = max(scale_top([*ratio, *high, *(method[1:] if method else ())]), 2.2)

    def x(row: float) -> str:
        return f"{100 * (row - 0.5) / widest:.2f}%"

    def y(value: float) -> str:
        return f"{plot - value / top * (plot - 8):.1f}"

    shapes = [_grid(float(y(tick)), f"{tick:g}×") for tick in ticks(top, 4)]
    limit = min(float(widest), top)
    shapes.append(tag("line", class_="diagonal", x1=x(1), y1=y(1), x2=x(limit), y2=y(limit)))
    points = list(zip(rows, ratio, strict=False))
    shapes += [
        tag("line", class_="spread", x1=x(row), x2=x(row), y1=y(bottom), y2=y(upper))
        for row, bottom, upper in zip(rows, low, high, strict=False)
    ]
    shapes += [
        tag("line", class_="curve", x1=x(a), y1=y(va), x2=x(b), y2=y(vb)) for (a, va), (b, vb) in itertools.pairwise(points)
    ]
    shapes += [tag("circle", class_="point", cx=x(row), cy=y(value), r=3.5) for row, value in points]
    if method:
        width, needed, reached = method
        shapes += [
            tag("line", class_="gain" if reached >= needed else "loss", x1=x(width), x2=x(width), y1=y(needed), y2=y(reached)),
            tag("circle", class_="dot" if reached >= needed else "dot hollow", cx=x(width), cy=y(reached), r=6),
            tag(
                "line",
                class_="needed",
                x1=f"{100 * (width - 0.75) / widest:.2f}%",
                x2=f"{100 * (width - 0.25) / widest:.2f}%",
                y1=y(needed),
                y2=y(needed),
            ),
        ]
    shapes += [tag("text", str(row), x=x(row), y=height - 5, text_anchor="middle") for row in rows]
    return figure(ident, title, description, height, *shapes)


def _between(name: str, start: float, end: float, top: float, y: int, height: int) -> Markup:
    width = max(min(end, top) - max(start, 0.0), 0.0)
    return tag("rect", class_=name, x=at(start, top), width=f"{100 * width / top:.2f}%", y=y, height=height)


def _column(name: str, index: int, count: int, share: float, plot: int) -> Markup:
    tall = share * (plot - 8)
    return tag(
        "rect",
        class_=name,
        x=f"{100 * (index + 0.2) / count:.2f}%",
        width=f"{60 / count:.2f}%",
        y=f"{plot - tall:.1f}",
        height=f"{max(tall, 0):.1f}",
        rx=1,
    )


def _grid(y: float, label: str) -> Markup:
    """A level line with its label in the left margin, which page.css keeps free."""
    return tag("line", class_="grid", x1=0, x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}") + tag(
        "text", label, class_="level", x=-8, y=f"{y + 4:.1f}", text_anchor="end"
    )


def rounds_strip(ident: str, title: str, description: str, rounds: Sequence[tuple[int, int]], total: int) -> Markup:
    """The rounds of one decoded text, left to right, as wide as the tokens each committed: (accepted drafts, own tokens).

    One path for all drafts and one for all the verifier's own tokens: a page has many strips. The strip holds no text, so
    it may stretch."""
    drafts, own, x = [], ["M0 0h1v8h-1z"], 1  # the first token comes out of the prefill
    for accepted, verified in rounds:
        if accepted:
            drafts.append(f"M{x} 0h{accepted}v8h-{accepted}z")
        if verified:
            own.append(f"M{x + accepted} 0h{verified}v8h-{verified}z")
        x += accepted + verified
    shapes = [tag("path", class_="own", d="".join(own))]
    if drafts:
        shapes.append(tag("path", class_="drafts", d="".join(drafts)))
    return figure(
        ident, title, description, 14, *shapes, class_="strip", viewBox=f"0 0 {max(total, x, 1)} 8", preserveAspectRatio="none"
    )
