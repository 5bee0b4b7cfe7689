"""A canvas on which a dog's parts are placed, filled with its coat and ruffled by its fur, the same on every machine.

Every coordinate is an integer before Pillow sees it, every draw of chance comes from `Random.random`, and the only
resampling is a 2 × 2 mean, so that no processor, library version or thread count can change a pixel.
"""

import math
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar, cast

from PIL import Image, ImageDraw

from workshop_utils.dogs.breeds import Breed

Points = list[tuple[float, float]]
Colour = tuple[int, ...]
T = TypeVar("T")

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PALETTE: dict[str, Colour] = {name: tuple(colour) for name, colour in TABLES["palette"].items()}
TOYS: list[Colour] = [tuple(colour) for colour in TABLES["toys"]]
_SHAPES = {name: [(*point, 0)[:3] for point in points] for name, points in TABLES["shapes"].items()}


class Canvas:
    """A picture that is being painted, at twice its size, and the random numbers that decide what is on it.

    Model coordinates grow to the right and downwards from the middle of the ground under the dog; an average dog is
    one unit long. `place` says where that is in the picture.
    """

    def __init__(self, breed: Breed, seed: int, size: int) -> None:
        self.breed, self.side = breed, 2 * size
        chance = Random(f"{breed.wnid}/{seed}")
        self.chance, self.between = chance.random, chance.uniform  # which is low + (high - low) * random()
        # Marks and hairs are painted on `under`, then cut out with `stencil`.
        self.image, self.under, self.stencil = (Image.new(mode, (self.side, self.side)) for mode in ("RGB", "RGB", "1"))
        self.draw, self.under_draw, self.stencil_draw = map(ImageDraw.Draw, (self.image, self.under, self.stencil))
        tone, warm = self.between(0.86, 1.1), self.between(-9, 9)
        instead = {of: PALETTE[word] for word, of in TABLES["instead"].items() if word in breed.extras}
        coats = {part: PALETTE[getattr(breed, part)] for part in ("coat", "mark", "light")}
        own = {part: shade((r + warm, g, b - warm), tone) for part, (r, g, b) in coats.items()}
        self.colours = {**PALETTE, **instead, **own, "lid": shade(own["coat"], 1.35 if sum(own["coat"]) < 260 else 0.6)}

    def count(self, n: int) -> int:
        return int(n * self.chance())

    def pick(self, options: Sequence[T]) -> T:
        return options[self.count(len(options))]

    def finish(self) -> Image.Image:
        """Return the picture at its own size, in a light drawn at random."""
        warm, bright = self.between(-0.1, 0.1), self.between(0.76, 1.14)
        table = [min(int(v * bright * g), 255) for g in (1 + warm, 1, 1 - warm) for v in range(256)]
        return self.image.reduce(2).point(table)

    def place(self, left: float, top: float, right: float, fill: float = 0.9) -> None:
        """Make the dog, from `left` to `right` and up to `top`, fill at most the share `fill` of a picture; tilt it."""
        self.scale = self.side * min(fill / (right - left), fill / -top) * self.between(0.62, 1)
        self.flip, tilt = self.pick((1, -1)), self.between(-0.07, 0.07)
        self.cos, self.sin = self.scale * math.cos(tilt), self.scale * math.sin(tilt)
        slack = max(self.side - self.scale * (right - left), 0) * 0.48
        self.x0 = self.side / 2 - self.flip * self.scale * (left + right) / 2 + self.between(-slack, slack)
        self.y0 = self.side * self.between(0.9, 0.97)

    def pixels(self, points: Points) -> Points:
        """Return where model `points` lie in the picture."""
        cos, sin, flip, x0, y0 = self.cos, self.sin, self.flip, self.x0, self.y0
        return [(x0 + flip * (x * cos - y * sin), y0 + x * sin + y * cos) for x, y in points]

    def outline(self, points: Points, fur: float = 0.0) -> Points:
        """Return a closed Catmull-Rom curve through model `points`, ruffled by the coat, in whole pixels."""
        p = self.pixels(points)
        fours = zip(p[-1:] + p[:-1], p, p[1:] + p[:1], p[2:] + p[:2], strict=True)
        curve = [
            (a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy)
            for (ax, ay), (bx, by), (cx, cy), (dx, dy) in fours
            for a, b, c, d in TABLES["spline"]
        ]
        if fur:
            mx, my = (math.fsum(values) / len(curve) for values in zip(*curve, strict=True))
            length, steps = fur * self.breed.fur * self.scale * 0.055, TABLES["textures"][self.breed.texture]
            for i, (x, y) in enumerate(curve):
                out = steps[i % len(steps)] * self.between(0.7, 1.3) * length
                reach = out / (abs(x - mx) + abs(y - my) + 1)
                curve[i] = x + (x - mx) * reach, y + (y - my) * reach + (0.4 * length if out else 0)
        return rounded(curve)

    def line(self, points: Points, colour: Colour, fineness: int = 180) -> None:
        self.draw.line(points, fill=colour, width=max(self.side // fineness, 1))

    def thread(self, points: Points) -> None:
        coat = self.colours["coat"]
        self.line(rounded(self.pixels(points)), shade(coat, 0.45) if sum(coat) > 190 else (20, 16, 18), 150)

    def oval(self, x: float, y: float, rx: float, ry: float, colour: Colour, line: float = 0.0) -> None:
        self.blob(at("circle", x, y, rx, ry), colour, line)

    def ovals(self, table: str, x: float, y: float, r: float) -> None:
        for u, v, rx, ry, colour, line in TABLES[table]:
            self.oval(x + u * r, y + v * r, rx * r, ry * r, self.colours[colour], line)

    def blob(self, points: Points, colour: Colour, line: float = 0.8) -> None:
        """Fill a curve through `points`. line: brightness of its edge relative to `colour`, 0 for no edge."""
        curve = self.outline(points)
        self.draw.polygon(curve, fill=colour)
        if line:
            self.line(curve + curve[:1], shade(colour, line))

    def part(self, name: str, points: Points, fur: float = 0.0, tone: float = 1.0, edge: float = 1.0) -> None:
        """Paint a part of the dog in its coat, with the breed's marks on `name` and, if `fur` is not 0, hairs.

        tone: brightness. edge: the share of the outline that is drawn as a line.
        """
        curve, coat = self.outline(points, fur), shade(self.colours["coat"], tone)
        xs, ys = zip(*curve, strict=True)
        box = max(min(xs), 0), max(min(ys), 0), min(max(xs) + 1, self.side), min(max(ys) + 1, self.side)
        if box[0] < box[2] and box[1] < box[3]:  # some of it is inside the picture
            self.under.paste(coat, box)
            flecks = list(self._flecks(name, points))
            for *oval, colour in flecks:
                fleck = rounded(self.pixels(at("fleck", *oval)))
                self.under_draw.polygon(fleck, fill=shade(self.colours[colour], tone))
            if fur and (flecks or self.breed.fur):
                self._hairs(*box)
            self.stencil.paste(0, box)
            self.stencil_draw.polygon(curve, fill=1)
            self.image.paste(self.under.crop(box), box, self.stencil.crop(box))
        drawn = curve[: max(int(len(curve) * edge), 2)] if edge < 1 else curve + curve[:1]
        self.line(drawn, shade(coat, 0.74 if sum(coat) > 190 else 1.5))

    def _flecks(self, name, points):
        xs, ys = zip(*points, strict=True)
        mx, my = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
        hx, hy = (max(xs) - min(xs)) / 2, (max(ys) - min(ys)) / 2
        fewer = {"side": 1, "front": 1, "leg": 3, "neck": 3}.get(name)
        for strewn in [table for word in self.breed.pattern if fewer and (table := TABLES["strewn"].get(word))]:
            for i in range(strewn["n"] // fewer):
                r, x, y = self.between(*strewn["r"]) * 0.45, self.between(-1, 1) * hx, self.between(-1, 1) * hy
                yield mx + x, my + y, r, r * strewn["tall"], strewn["colours"][i % len(strewn["colours"])]
        marks = [mark for word in self.breed.pattern for mark in TABLES["marks"].get(word, ()) if mark[0] == name]
        for _, colour, x, y, rx, ry in marks:
            for u in {x, -x} if name in ("skull", "muzzle", "front") else {x}:
                yield mx + u * hx, my + y * hy, rx * hx, ry * hy, colour

    def _hairs(self, left, top, right, foot):
        texture, unit, wide, tall = self.breed.texture, self.scale * 0.05, right - left, foot - top
        long = unit * (2.6 if texture == "cords" else 0.5 + self.breed.fur)
        width = max(self.side // (70 if texture == "cords" else 200), 1)
        for i in range(min(int(wide * tall / (unit * unit * 3)), 120) if min(wide, tall) >= 4 else 0):
            x, y = left + self.count(wide), top + self.count(tall)
            tone = shade(cast(Colour, self.under.getpixel((x, y))), (0.84, 1.16)[i % 2])
            if texture == "curly":
                r = round(unit * 0.7)
                self.under_draw.arc((x - r, y - r, x + r, y + r), 20, 250, fill=tone, width=2)
            else:
                lean = self.between(-1, 1) * (0.9 if texture == "wiry" else 0.3)
                self.under_draw.line((x, y, round(x + lean * long), round(y + long)), fill=tone, width=width)


def at(shape: str, x: float, y: float, rx: float, ry: float) -> Points:
    """Return the outline of a `shape` of the table around (x, y); `rx` and `ry` are its units to the side and down."""
    return [(x + u * rx, y + v * ry + rest) for u, v, rest in _SHAPES[shape]]


def rounded(points: Points) -> Points:
    return [(round(x), round(y)) for x, y in points]


def shade(colour: Iterable[float], factor: float) -> Colour:
    """Return a colour made brighter or darker by `factor`, in whole numbers from 0 to 255."""
    return tuple(max(0, min(255, int(channel * factor))) for channel in colour)
