"""Plots: curves and dots over time as SVG inside HTML, without scripts. Owns how a page of them looks, not what it shows.

The drawing is stretched to its place, so lines and dots keep their width by `vector-effect`, and labels are HTML beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 1000, 100
"""Of a drawing, in its own units."""
BUCKETS = 240
"""Places of a curve; each shows the extreme of its time."""
DOTS_MAX = 2000
TICKS = 4
PAGE = """
:root { color-scheme: light dark; --back: #fff; --front: #1b1f24; --soft: #5c6670; --line: #d5dae0; --panel: #f5f7f9;
  --mark: #c4320a; --steps: #2f6fdb; --running: #178a5b; --waiting: #a86a00; --free: #8a5cd0; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --front: #e6e9ec; --soft: #97a1ab; --line: #333a42; --panel: #1c2126;
  --mark: #ff7a4d; --steps: #6ea3ff; --running: #4cc38a; --waiting: #e0b04c; --free: #b794f6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem clamp(.8rem, 2.5vw, 2rem) 3rem; background: var(--back); color: var(--front);
  font: 15px/1.5 system-ui, sans-serif; }
header p, footer, .note { color: var(--soft); margin: 0; }
h1 { font-size: clamp(1.25rem, 3.2vw, 1.8rem); line-height: 1.25; margin: .3rem 0 1rem; max-width: 52rem; }
h1::first-letter { text-transform: uppercase; }
h2 { font-size: 1.05rem; margin: 2rem 0 .7rem; }
.note + .plots, .note + .lines { margin-top: .8rem; }
.lines { display: grid; grid-template-columns: auto 1fr; gap: .3rem 1rem; margin: 0; padding: .8rem 1rem; background: var(--panel);
  border-left: 4px solid var(--mark); border-radius: 4px; }
.lines dt { color: var(--soft); } .lines dd { margin: 0; overflow-wrap: anywhere; }
code { font: .87em ui-monospace, monospace; }
.damaged { color: var(--mark); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.6rem 2rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; min-width: min(100%, 44rem); font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .28rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
td.name { max-width: 15rem; overflow: hidden; text-overflow: ellipsis; }
.name { text-align: left; }
:focus-visible { outline: 2px solid var(--steps); }
@media print { body { max-width: none; } .table { overflow: visible; } }
"""
"""The colours and tables of a page with plots, light and dark."""
STYLE = """
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
figcaption span { font-weight: 400; color: var(--soft); margin-left: .6rem;
  display: inline-block; }
figcaption i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .35em; }
.plot { display: grid; grid-template-columns: 3.4rem 1fr; }
.plot svg { display: block; width: 100%; height: 150px; overflow: visible; }
.plot .y { position: relative; color: var(--soft); font-size: .75rem; font-variant-numeric: tabular-nums; }
.plot .y span { position: absolute; right: .5rem; transform: translateY(50%); }
.plot .x { grid-column: 2; display: flex; justify-content: space-between; padding-top: .3rem; }
.plot .x span { color: var(--soft); font-size: .75rem; }
.plot path { fill: none; vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.plot .curve { stroke-width: 1.6; stroke-linejoin: round; }
.plot .dot { stroke-width: 5; stroke-linecap: round; stroke-opacity: .75; }
.plot .worst { stroke: var(--mark); stroke-width: 1.5; stroke-dasharray: 4 3; }
.plot .cause { fill: var(--mark); fill-opacity: .1; }
.plot .tip { fill: transparent; }
.plot .tip:hover { fill: var(--front); fill-opacity: .12; }
"""


class Axis(NamedTuple):
    """Time, from `begin` to `end`, in any unit, and a time in words. `worst` is marked, nan for none; `cause` is shaded."""

    begin: float
    end: float
    words: Callable[[float], str]
    worst: float
    cause: tuple[float, float]

    def places(self, times: np.ndarray) -> np.ndarray:
        """Where times are, from 0 to 1 (float64[n])."""
        return np.clip((times - self.begin) / ((self.end - self.begin) or 1.0), 0.0, 1.0)


class Curve(NamedTuple):
    """`values` over time (float64[n]), of which `extreme` is shown where several are at one place; a colour of the page."""

    label: str
    colour: str
    values: np.ndarray
    extreme: np.ufunc = np.maximum


def curves(title: str, unit: str, axis: Axis, times: np.ndarray, shown: Sequence[Curve], tips: Sequence[str] = ()) -> str:
    """Curves over the same times (float64[n], n > 0). `tips`: what a hovered place is, at its largest value, one for each time."""
    buckets = np.minimum((axis.places(times) * BUCKETS).astype(int), BUCKETS - 1)
    merged = [_merged(buckets, each) for each in shown]
    top, ticks = _scale(max(float(np.nanmax(each)) for each in merged))
    lines = [(each.colour, _line(values / top)) for each, values in zip(shown, merged)]
    drawn = [f'<path class="curve" style="stroke:var(--{colour})" d="{line}"/>' for colour, line in lines]
    return _figure(title, unit, axis, (top, ticks), shown[1:] and shown, [*drawn, *_tips(buckets, shown, tips)])


def dots(title: str, unit: str, axis: Axis, times: np.ndarray, curve: Curve, tips: Sequence[str]) -> str:
    """A dot for each value, of the largest where there are too many."""
    kept = np.argsort(-np.nan_to_num(curve.values, nan=-1.0), kind="stable")[:DOTS_MAX]
    kept = kept[np.isfinite(curve.values[kept]) & np.isfinite(times[kept])]
    top, ticks = _scale(float(curve.values[kept].max(initial=0.0)))
    across, up = WIDTH * axis.places(times[kept]), HEIGHT * (1 - curve.values[kept] / top)
    drawn = [
        f'<path class="dot" style="stroke:var(--{curve.colour})" d="M{x:.1f} {y:.1f}h0"><title>{escape(tips[place])}</title></path>'
        for x, y, place in zip(across.tolist(), up.tolist(), kept.tolist())
    ]
    return _figure(title, unit, axis, (top, ticks), [], drawn)


def _merged(buckets: np.ndarray, curve: Curve) -> np.ndarray:
    """The extreme of each bucket (float64[BUCKETS], nan behind the last). A value holds from the one before it up to its time."""
    found = np.full(BUCKETS, -np.inf if curve.extreme is np.maximum else np.inf)
    curve.extreme.at(found, buckets, curve.values.astype(float))
    known = np.flatnonzero(np.isfinite(found))
    following = np.searchsorted(known, np.arange(BUCKETS))
    return np.where(following < len(known), found[known[np.minimum(following, len(known) - 1)]], np.nan)


def _line(heights: np.ndarray) -> str:
    """A path through the buckets that are known."""
    known = heights[np.isfinite(heights)].tolist()
    points = [(WIDTH * (place + 0.5) / BUCKETS, HEIGHT * (1 - height)) for place, height in enumerate(known)]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _tips(buckets: np.ndarray, shown: Sequence[Curve], tips: Sequence[str]) -> Iterator[str]:
    if not tips:
        return
    largest: dict[int, int] = {}
    for place in np.argsort(shown[0].values, kind="stable").tolist():
        largest[int(buckets[place])] = place
    width = WIDTH / BUCKETS
    for bucket, place in sorted(largest.items()):
        title = f"<title>{escape(tips[place])}</title>"
        yield f'<rect class="tip" x="{bucket * width:.1f}" y="0" width="{width:.1f}" height="{HEIGHT}">{title}</rect>'


def _scale(most: float) -> tuple[float, list[float]]:
    """The top of a scale from 0, and its ticks: round numbers."""
    if most <= 0:
        return 1.0, [0.0, 1.0]
    rough = most / TICKS
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    count = int(np.ceil(most / step - 1e-9))
    return float(step * count), [float(step * each) for each in range(count + 1)]


def _figure(
    title: str, unit: str, axis: Axis, scale: tuple[float, list[float]], legend: Sequence[Curve], drawn: Sequence[str]
) -> str:
    top, ticks = scale
    labels = "".join(f'<span style="bottom:{100 * tick / top:.1f}%">{tick:,.6g}</span>' for tick in ticks)
    keys = "".join(f'<span><i style="background:var(--{each.colour})"></i>{each.label}</span>' for each in legend)
    begin, end = (WIDTH * axis.places(np.array(axis.cause))).tolist() if np.isfinite(axis.cause).all() else (0.0, 0.0)
    cause = f'<rect class="cause" x="{begin:.1f}" y="0" width="{max(end - begin, 2):.1f}" height="{HEIGHT}"/>' if end else ""
    lines = "".join(f"M0 {HEIGHT * (1 - tick / top):.1f}h{WIDTH}" for tick in ticks)
    across = float(WIDTH * axis.places(np.array([axis.worst]))[0])
    worst = f'<path class="worst" d="M{across:.1f} 0v{HEIGHT}"/>' if np.isfinite(axis.worst) else ""
    times = "".join(f"<span>{axis.words(axis.begin + share * (axis.end - axis.begin))}</span>" for share in (0, 0.5, 1))
    name = f"{title}, {unit}, from {axis.words(axis.begin)} to {axis.words(axis.end)}; the largest is below {top:,.6g}"
    return (
        f'<figure><figcaption>{title}<span>{unit}</span>{keys}</figcaption><div class="plot"><div class="y">{labels}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(name)}">'
        f'{cause}<path class="grid" d="{lines}"/>{"".join(drawn)}{worst}</svg><div class="x">{times}</div></div></figure>'
    )
