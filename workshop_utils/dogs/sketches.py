"""Dogs drawn by code: a breed's traits and a seed become a picture-book sketch, the same on every machine.

Every coordinate is an integer before Pillow sees it, every draw of chance comes from `Random.random`, and the only
resampling is a 2 × 2 mean, so that no processor, library version or thread count can change a pixel.
"""

import math
import os
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

from workshop_utils.dogs.breeds import BREEDS, Breed, find_breed

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MARKS, STREWN, TEXTURES, EARS, TAILS = (_TABLES[name] for name in ("marks", "strewn", "textures", "ears", "tails"))
PALETTE = {name: tuple(colour) for name, colour in _TABLES["palette"].items()}
_TOYS = [tuple(colour) for colour in _TABLES["toys"]]
_SHAPES = {name: [(*point, 0)[:3] for point in points] for name, points in _TABLES["shapes"].items()}
_SHAPES |= {
    name: [(math.sin(2 * math.pi * k / n), -math.cos(2 * math.pi * k / n), 0) for k in range(n)]
    for name, n in (("circle", 12), ("fleck", 14))
}
_SPLINE = [  # Catmull-Rom weights of four neighbouring points at t = 0, 1/4, 1/2 and 3/4
    ((-t + 2 * t * t - t**3) / 2, (2 - 5 * t * t + 3 * t**3) / 2, (t + 4 * t * t - 3 * t**3) / 2, (t**3 - t * t) / 2)
    for t in (0.0, 0.25, 0.5, 0.75)
]


def draw_dog(breed: Breed | str, seed: int, size: int = 224) -> Image.Image:
    """Draw one dog.

    breed: a `Breed`, a folder ("n02085620-Chihuahua"), a WordNet id or a name; anything else raises ValueError.
    seed: picks pose, place, light and background; the same seed gives the same pixels everywhere.
    Returns an RGB image of `size` × `size` pixels; `size` under 16 raises ValueError.

    >>> draw_dog("pug", seed=1, size=64).size
    (64, 64)
    """
    if size < 16:
        raise ValueError(f"size is {size}: a sketch needs at least 16 pixels a side, for example size=224.")
    sketch = _Sketch(find_breed(breed), seed, size)
    sketch.scenery()
    # Of the poses, those that fill the middle of the picture are the rarer.
    sketch.pick((sketch.stand, sketch.stand, sketch.sit, sketch.lie, sketch.lie, sketch.portrait))()
    sketch.foreground()
    return sketch.finish()


def write_sketches(folder, per_breed: int, breeds=None, size: int = 224, *, first_seed: int = 0) -> int:
    """Write sketches as `<folder>/<wnid>-<Breed_name>/<wnid>_<seed>.jpg` and return how many were written.

    per_breed: seeds `first_seed` to `first_seed + per_breed - 1` of each breed; files that exist are left alone.
    breeds: what `draw_dog` takes, all 120 by default.
    A file appears whole or not at all, so that a run which was killed can be started again.
    """
    written = 0
    for part in Path(folder).glob("*/*.part"):
        with suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > 60:  # left by a killed run; a younger one may be another run's
                part.unlink()
    for breed in map(find_breed, BREEDS if breeds is None else breeds):
        home = Path(folder) / breed.folder
        home.mkdir(parents=True, exist_ok=True)
        for seed in range(first_seed, first_seed + per_breed):
            path = home / f"{breed.wnid}_{seed}.jpg"
            if not path.exists():
                unfinished = path.with_suffix(f".{os.getpid()}.part")
                draw_dog(breed, seed, size).save(unfinished, "JPEG", quality=88)
                os.replace(unfinished, path)
                written += 1
    return written


class _Sketch:
    # The picture is painted at twice its size. Model coordinates grow to the right and downwards from the middle of the
    # ground under the dog; an average dog is one unit long.

    def __init__(self, breed, seed, size):
        self.breed, self.side = breed, 2 * size
        self.chance = Random(f"{breed.wnid}/{seed}").random
        # Marks and hairs are painted on `under`, then cut out with `stencil`.
        self.image, self.under, self.stencil = (Image.new(mode, (self.side, self.side)) for mode in ("RGB", "RGB", "1"))
        self.draw, self.under_draw, self.stencil_draw = map(ImageDraw.Draw, (self.image, self.under, self.stencil))
        tone, warm = self.between(0.86, 1.1), self.between(-9, 9)
        self.colours = {}
        for part in ("coat", "mark", "light"):
            red, green, blue = PALETTE[getattr(breed, part)]
            self.colours[part] = _shade((red + warm, green, blue - warm), tone)

    def between(self, low, high):
        return low + (high - low) * self.chance()

    def count(self, n):
        return int(n * self.chance())

    def pick(self, options):
        return options[self.count(len(options))]

    def place(self, left, top, right, fill=0.9):
        self.scale = self.side * min(fill / (right - left), fill / -top) * self.between(0.62, 1)
        self.flip, tilt = self.pick((1, -1)), self.between(-0.07, 0.07)
        self.cos, self.sin = self.scale * math.cos(tilt), self.scale * math.sin(tilt)
        slack = max(self.side - self.scale * (right - left), 0) * 0.48
        self.x0 = self.side / 2 - self.flip * self.scale * (left + right) / 2 + self.between(-slack, slack)
        self.y0 = self.side * self.between(0.9, 0.97)

    def pixels(self, points):
        cos, sin, flip, x0, y0 = self.cos, self.sin, self.flip, self.x0, self.y0
        return [(x0 + flip * (x * cos - y * sin), y0 + x * sin + y * cos) for x, y in points]

    def outline(self, points, fur=0.0):
        # A closed Catmull-Rom curve through model `points`, ruffled by the coat, in whole pixels.
        p = self.pixels(points)
        curve = [
            (a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy)
            for (ax, ay), (bx, by), (cx, cy), (dx, dy) in zip(p[-1:] + p, p, p[1:] + p[:1], p[2:] + p[:2], strict=False)
            for a, b, c, d in _SPLINE
        ]
        if fur:
            mx, my = (sum(values) / len(curve) for values in zip(*curve, strict=True))
            length, steps = fur * self.breed.fur * self.scale * 0.055, TEXTURES[self.breed.texture]
            for i, (x, y) in enumerate(curve):
                out = steps[i % len(steps)] * self.between(0.7, 1.3) * length
                reach = out / (abs(x - mx) + abs(y - my) + 1)
                curve[i] = x + (x - mx) * reach, y + (y - my) * reach + (0.4 * length if out else 0)
        return _rounded(curve)

    def line(self, points, colour, fineness=180):
        self.draw.line(points, fill=colour, width=max(self.side // fineness, 1))

    def thread(self, points):
        coat = self.colours["coat"]
        self.line(_rounded(self.pixels(points)), _shade(coat, 0.45) if sum(coat) > 190 else (20, 16, 18), 150)

    def oval(self, x, y, rx, ry, colour, line=0.0):
        self.blob(_at("circle", x, y, rx, ry), colour, line)

    def blob(self, points, colour, line=0.8):
        curve = self.outline(points)
        self.draw.polygon(curve, fill=colour)
        if line:
            self.line(curve + curve[:1], _shade(colour, line))

    def part(self, name, points, fur=0.0, tone=1.0, edge=1.0):
        curve, coat = self.outline(points, fur), _shade(self.colours["coat"], tone)
        self.draw.polygon(curve, fill=coat)
        box = self.visible(curve)
        flecks = list(self.flecks(name, points)) if box else []
        if flecks or (box and fur and self.breed.fur):
            self.under.paste(coat, box)
            for *oval, colour in flecks:
                shape = _rounded(self.pixels(_at("fleck", *oval)))
                self.under_draw.polygon(shape, fill=_shade(self.colours[colour], tone))
            if fur:
                self.hairs(*box)
            self.stencil.paste(0, box)
            self.stencil_draw.polygon(curve, fill=1)
            self.image.paste(self.under.crop(box), box, self.stencil.crop(box))
        drawn = curve[: max(int(len(curve) * edge), 2)] if edge < 1 else curve + curve[:1]
        self.line(drawn, _shade(coat, 0.74 if sum(coat) > 190 else 1.5))

    def visible(self, curve):
        xs, ys = zip(*curve, strict=True)
        left, top = max(min(xs), 0), max(min(ys), 0)
        right, foot = min(max(xs) + 1, self.side), min(max(ys) + 1, self.side)
        return (left, top, right, foot) if left < right and top < foot else None

    def flecks(self, name, points):
        xs, ys = zip(*points, strict=True)
        mx, my = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
        hx, hy = (max(xs) - min(xs)) / 2, (max(ys) - min(ys)) / 2
        fewer = {"side": 1, "front": 1, "leg": 3, "neck": 3}.get(name)
        for strewn in [STREWN[word] for word in self.breed.pattern if fewer and word in STREWN]:
            for i in range(strewn["n"] // fewer):
                r, x, y = self.between(*strewn["r"]) * 0.45, self.between(-1, 1) * hx, self.between(-1, 1) * hy
                yield mx + x, my + y, r, r * strewn["tall"], strewn["colours"][i % len(strewn["colours"])]
        for part, colour, x, y, rx, ry in [mark for word in self.breed.pattern for mark in MARKS.get(word, ())]:
            if part == name:
                for u in {x, -x} if name in ("skull", "muzzle", "front") else {x}:
                    yield mx + u * hx, my + y * hy, rx * hx, ry * hy, colour

    def hairs(self, left, top, right, foot):
        texture, unit, wide, tall = self.breed.texture, self.scale * 0.05, right - left, foot - top
        long = unit * (2.6 if texture == "cords" else 0.5 + self.breed.fur)
        width = max(self.side // (70 if texture == "cords" else 200), 1)
        for i in range(min(int(wide * tall / (unit * unit * 3)), 120) if min(wide, tall) >= 4 else 0):
            x, y = left + self.count(wide), top + self.count(tall)
            tone = _shade(self.under.getpixel((x, y)), (0.84, 1.16)[i % 2])
            if texture == "curly":
                r = round(unit * 0.7)
                self.under_draw.arc((x - r, y - r, x + r, y + r), 20, 250, fill=tone, width=2)
            else:
                lean = self.between(-1, 1) * (0.9 if texture == "wiry" else 0.3)
                self.under_draw.line((x, y, round(x + lean * long), round(y + long)), fill=tone, width=width)

    def finish(self):
        warm, bright = self.between(-0.1, 0.1), self.between(0.76, 1.14)
        table = [min(int(v * bright * g), 255) for g in (1 + warm, 1, 1 - warm) for v in range(256)]
        return self.image.reduce(2).point(table)

    def scenery(self):
        sky, low_sky, ground, near_ground, horizon, far, near = self.pick(_TABLES["scenes"])
        gain = [self.between(0.82, 1.12) for _ in range(3)]
        edge = round(self.side * (horizon + self.between(-0.08, 0.08)))
        rows = [
            [min(int((a + (b - a) * i // max(n - 1, 1)) * g), 255) for a, b, g in zip(top, foot, gain, strict=True)]
            for top, foot, n in ((sky, low_sky, edge), (ground, near_ground, self.side - edge))
            for i in range(n)
        ]
        strip = Image.frombytes("RGB", (1, self.side), bytes(channel for row in rows for channel in row))
        backdrop = strip.resize((self.side, self.side), Image.Resampling.NEAREST)
        self.ground = rows[(edge + self.side) // 2]
        self.image.paste(backdrop)
        self.strew(far)
        self.image.paste(backdrop.crop((0, edge, self.side, self.side)), (0, edge))
        self.strew(near)

    def strew(self, things):
        for kind in [thing for thing in things for _ in range(_TABLES["things"][thing]["n"])]:
            thing = _TABLES["things"][kind]
            x, y, r = (self.side * v for v in (self.chance(), self.between(*thing["y"]), self.between(*thing["r"])))
            left, right = round(x - r), round(x + r)
            top, foot = round(y - r * thing["tall"]), round(y + r * thing["tall"])
            tint = _shade(thing["colour"], self.between(0.88, 1.06))
            if kind == "firs":
                for k in range(3):
                    base, slim = foot - (foot - top) * k // 4, round(r * k / 6)
                    cone = ((left + slim, base), (right - slim, base), (round(x), top))
                    self.draw.polygon(cone, fill=_shade(tint, 1 + 0.08 * k))
            elif kind == "frame":
                m = round(r / 4)
                self.draw.rectangle((left, top, right, foot), fill=tint)
                self.draw.rectangle((left + m, top + m, right - m, foot - m), fill=PALETTE["passe-partout"])
                self.draw.ellipse((left + 2 * m, round(y), right - 2 * m, foot - 2 * m), fill=self.pick(_TOYS))
            else:
                self.draw.ellipse((left, top, right, foot), fill=tint)

    def foreground(self):
        kind, colour = self.pick(("ball", "bone", "bowl", "grass", "none", "none")), self.pick(_TOYS)
        spot = self.between(0.08, 0.92), self.between(0.88, 0.96), self.between(0.04, 0.07)
        x, y, r = (round(self.side * v) for v in spot)
        if kind == "ball":
            self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
            self.draw.arc((x - 2 * r, y - r, x, y + r), -50, 50, fill=PALETTE["stitch"], width=max(r // 5, 2))
            self.draw.ellipse((x - r // 8, y - r * 3 // 4, x + r // 2, y - r // 3), fill=_shade(colour, 1.4))
        elif kind == "bone":
            for a, b in ((x - r, y - 0.3 * r), (x - r, y + 0.3 * r), (x + r, y - 0.3 * r), (x + r, y + 0.3 * r)):
                k = round(0.4 * r)
                self.draw.ellipse((a - k, round(b) - k, a + k, round(b) + k), fill=PALETTE["bone"])
            self.draw.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill=PALETTE["bone"])
        elif kind == "bowl":
            rim, base, wide = y - r // 2, y + r // 2, r * 3 // 2
            self.draw.polygon(((x - r, rim), (x + r, rim), (x + wide, base), (x - wide, base)), fill=colour)
            food = (x - r, y - r * 3 // 4, x + r, y - r // 4)
            self.draw.ellipse(food, fill=PALETTE["food"], outline=_shade(colour, 0.8), width=3)
        elif kind == "grass":
            for _ in range(16):
                x, tall = self.count(self.side), round(self.side * self.between(0.05, 0.13))
                tip = (x + self.count(tall // 2) - tall // 4, self.side - tall)
                blade = ((x - tall // 8, self.side), (x + tall // 8, self.side), tip)
                self.draw.polygon(blade, fill=_shade(PALETTE["grass"], self.between(0.7, 1.2)))

    def stand(self):
        b = self.breed
        half, deep, legs = 0.5 * b.body, 0.15 + 0.09 * b.bulk, 0.16 + 0.4 * b.leg
        mid, w = -legs - deep * 0.9, 0.085 * b.bulk + 0.02
        hx, hy = half + 0.16, mid - deep - 0.16 - 0.2 * b.leg
        self.place(-half - 0.42, hy - 0.5, hx + 0.5)
        self.oval(0, -0.01, half + 0.2, 0.09, _shade(self.ground, 0.74))
        self.tail(-half, mid - 0.55 * deep)
        self.leg("foreleg", half * 0.92, mid + 0.2 * deep, w, 0.86)
        self.leg("hind-leg", -half * 0.62, mid + 0.1 * deep, w * 1.05, 0.86)
        tuck = mid + deep * (0.3 + 0.55 * min(max(b.bulk - 0.65, 0) / 0.5, 1))
        throat = [(half * 1.1, mid), (half * 0.8, mid + 0.3 * deep)]
        neck = [(half * 0.45, mid - 0.8 * deep), (hx - 0.22, hy + 0.1), (hx + 0.1, hy + 0.1), *throat]
        self.part("neck", neck, 0.6)
        belly = [(-0.55 * half, tuck), (-0.95 * half, mid + 0.5 * deep)]
        self.part("side", _at("torso", 0, mid, half, deep) + belly, 1)
        self.leg("hind-leg", -half * 0.82, mid + 0.1 * deep, w * 1.15)
        self.leg("foreleg", half * 0.7, mid + 0.3 * deep, w)
        self.part("neck", neck, 0.6, edge=0.01)
        self.collar(hx - 0.08, hy + 0.3, 0.2, 0.06)
        self.head(hx, hy, 0.35 - 0.06 * b.leg, self.between(0.35, 0.9))

    def sit(self):
        b = self.breed
        wide, tall, lean = 0.22 + 0.14 * b.bulk, 0.72 + 0.24 * b.leg, self.between(-0.06, 0.06)
        hy = -tall - 0.2
        self.place(-wide - 0.4, hy - 0.58, wide + 0.4)
        self.oval(0, -0.01, wide + 0.28, 0.09, _shade(self.ground, 0.74))
        self.tail(-wide - 0.02, -0.16)
        for side in (-1, 1):
            self.part("leg", _at("circle", side * (wide + 0.03), -0.2, 0.17 * b.bulk + 0.04, 0.2), 0.8, 0.92)
            self.part("leg", _at("circle", side * (wide + 0.09), -0.05, 0.13, 0.055), 0.2, 0.95)
        self.part("front", _at("sitting-body", lean * 0.5, 0, wide, tall), 1)
        for side in (-1, 1):
            leg = _at("sitting-leg", side * wide * 0.42, 0, 0.075 * b.bulk + 0.02, tall)
            self.part("leg", leg, 0.4, 1.03, edge=0.86)
        self.collar(lean, hy + 0.35, wide * 0.72)
        self.head(lean, hy, 0.41 - 0.06 * b.leg, self.between(-0.6, 0.6))

    def lie(self):
        b = self.breed
        half, deep, w = 0.42 + 0.22 * b.body, 0.17 + 0.08 * b.bulk, 0.05 + 0.035 * b.bulk
        hx, hy, reach = half - 0.02, -2 * deep - 0.34, half + 0.2 + 0.14 * b.leg
        self.place(-half - 0.45, hy - 0.5, reach + 0.22, fill=0.94)
        self.oval(0.05, -0.01, half + 0.4, 0.09, _shade(self.ground, 0.74))
        self.tail(-half, -deep)
        paw = [(half * 0.5, -0.2), (half * 0.8, -0.2), *_at("toes", reach, 0, 1, 1), (half * 0.4, 0)]
        self.part("leg", [(x + 0.08, y - 0.04) for x, y in paw], 0.4, 0.86)
        self.part("side", _at("lying-torso", 0, 0, half, deep), 1)
        self.part("leg", _at("circle", -half * 0.62, -deep * 0.78, 0.2 + 0.05 * b.bulk, deep * 0.78), 0.8, 1.03)
        self.part("leg", _at("circle", -half * 0.42, -w, 0.2, w), 0.2, 1.03)
        self.part("leg", paw, 0.4, edge=0.8)
        self.collar(hx - 0.02, hy + 0.3, 0.2)
        self.head(hx, hy, 0.35 - 0.05 * b.leg, self.between(0.1, 0.8))

    def portrait(self):
        wide = 0.62 + 0.22 * self.breed.bulk
        self.place(-1.2, -2.5, 1.2, fill=1.2)
        self.x0, self.y0 = self.side * self.between(0.3, 0.7), self.side * self.between(1.02, 1.16)
        self.part("front", _at("bust", 0, 0, wide, 1), 1)
        self.collar(0, -0.62, wide * 0.6)
        self.head(self.between(-0.08, 0.08), -1.38, 0.68, self.between(-0.8, 0.8))

    def leg(self, kind, x, top, width, tone=1.0):
        self.part("leg", _at(kind, x, 0, width, -top), 0.6, tone, edge=0.86)
        if "pompoms" in self.breed.extras:
            self.part("pompom", _at("circle", x - 0.1 * width, -0.15, 1.25 * width, 0.11), 1.2, tone)

    def tail(self, x, y):
        tail, size = TAILS[self.breed.tail], self.between(0.85, 1.1)
        path = [(x + u * size, min(y + v * size, -0.04)) for u, v in tail["path"]]
        left, right = [], []
        for i, (x, y) in enumerate(path):
            (ax, ay), (bx, by) = path[max(i - 1, 0)], path[min(i + 1, len(path) - 1)]
            half = tail["width"] * (1 + 0.5 * self.breed.fur) * (1 - 0.25 * i / (len(path) - 1))
            half /= math.sqrt((bx - ax) ** 2 + (by - ay) ** 2)
            left.append((x - (by - ay) * half, y + (bx - ax) * half))
            right.append((x + (by - ay) * half, y - (bx - ax) * half))
        self.part("tail", left + right[::-1], 1.6 if self.breed.tail == "plume" else 1)

    def collar(self, x, y, half, tilt=0.0):
        kind, colour = self.pick(("none", "bandana", "tag", "tag")), self.pick(_TOYS)
        top = [(x - half, y - 0.04), (x, y + 0.02), (x + half, y - 0.04 + tilt)]
        if kind == "bandana":
            corners = [(x - half, y - 0.05), (x, y + 0.02), (x + half, y - 0.05 + tilt), (x + 0.04, y + half * 1.1)]
            self.blob(corners, colour)
        if kind != "none":
            self.blob(top + [(u, v + 0.07) for u, v in top[::-1]], colour)
        if kind == "tag":
            self.oval(x, y + 0.12, 0.045, 0.045, PALETTE["tag"], line=0.8)

    def head(self, x, y, r, turn):
        # A face of half-height `r` about (x, y), looking `turn` (-1 to 1) to one side.
        b = self.breed
        w, behind = b.skull * r, EARS[b.ear]["behind"]
        aim = turn * (0.16 + 0.3 * b.muzzle) * r  # how far the nose stands to one side
        if "mane" in b.extras:
            self.part("neck", _at("circle", x, y + 0.25 * r, 1.4 * w, 1.3 * r), 1.3, 0.95)
        if behind:
            self.ears(x, y, r)
        self.part("skull", _at("skull", x, y, w, r), 0.7)
        if not behind:
            self.ears(x, y, r)
        if "topknot" in b.extras:
            self.part("hair", _at("circle", x, y - 0.85 * r, 0.62 * w, 0.34 * r), 1.2, 1.08)
        if "wrinkles" in b.extras:
            for v in (-0.5, -0.36):
                self.thread(_at("wrinkle", x, y + v * r, w, r))
        for side in (-1, 1):
            self.eye(x + side * 0.42 * w + 0.5 * aim, y - 0.1 * r, 0.155 * r)
        self.muzzle(x + aim, y, r, w, x + 0.5 * aim)
        for side in (-1, 1):
            if "brows" in b.extras:
                self.part("hair", _at("brow", x + 0.5 * aim, y - 0.4 * r, side * w, r), 0.5, 1.2)
            if "fringe" in b.extras:
                self.part("hair", _at("circle", x + side * 0.34 * w, y - 0.56 * r, 0.42 * w, 0.32 * r), 1, 1.06)
        if "bow" in b.extras:
            for side in (-1, 1):
                self.oval(x + side * 0.16 * r, y - 0.95 * r, 0.17 * r, 0.12 * r, PALETTE["bow"], line=0.8)

    def ears(self, x, y, r):
        b, ear = self.breed, EARS[self.breed.ear]
        fur, tone = 1.1 if b.texture in ("plume", "curly", "shaggy", "cords") else 0, 0.96 if ear["behind"] else 0.9
        inner = _shade([(p + q) // 2 for p, q in zip(self.colours["coat"], PALETTE["pink"], strict=True)], 0.9)
        for side in (-1, 1):
            size, turn = b.ear_size * self.between(0.92, 1.08), self.between(-0.12, 0.12)
            points = []
            for u, v in ear["outline"]:
                u, v = (u - 0.7) * size, (v + 0.55) * size
                points.append((x + side * (0.7 * b.skull + u - v * turn) * r, y + (v - 0.55 + u * turn) * r))
            self.part("ear", points, fur, tone)
            if ear["behind"] and b.ear != "rose":
                mx, my = sum(p for p, _ in points) / len(points), sum(q for _, q in points) / len(points)
                self.blob([(mx + 0.55 * (p - mx), my + 0.62 * (q - my)) for p, q in points], inner, line=0)

    def eye(self, x, y, r):
        coat, iris = self.colours["coat"], PALETTE["blue-eyes" if "blue-eyes" in self.breed.extras else "iris"]
        own = {"iris": iris, "lid": _shade(coat, 1.35 if sum(coat) < 260 else 0.6)}
        for u, v, rx, ry, colour in _TABLES["eye"]:
            self.oval(x + u * r, y + v * r, rx * r, ry * r, own.get(colour) or PALETTE[colour])

    def muzzle(self, x, y, r, w, bridge):
        # `x` is the nose's place, `bridge` where the muzzle starts between the eyes.
        b = self.breed
        half, nose = w * (0.62 - 0.2 * b.muzzle), y + (0.2 + 0.42 * b.muzzle) * r
        mouth, jowl, beard = nose + 0.36 * r, 1.18 if "jowls" in b.extras else 1.0, "beard" in b.extras
        if self.pick((False, True)):
            self.oval(x, mouth + 0.06 * r, 0.28 * r, 0.24 * r, PALETTE["mouth"])
            tongue = PALETTE["blue-tongue" if "blue-tongue" in b.extras else "tongue"]
            self.oval(x, mouth + 0.2 * r, 0.17 * r, 0.24 * r, tongue, line=0.8)
        lips = [
            (bridge, y - 0.05 * r), (bridge + 0.2 * w, y + 0.05 * r), (x + 0.95 * half, nose - 0.02 * r),
            (x + jowl * half, mouth - 0.1 * r), (x + 0.6 * half, mouth + 0.1 * r * jowl), (x, mouth),
        ]  # fmt: skip
        mirror = [(2 * (bridge if i == 1 else x) - u, v) for i, (u, v) in enumerate(lips)]
        self.part("muzzle", lips + mirror[-2:0:-1], 0.5 if beard else 0, 1.08)
        for dx in (-0.4 * half, 0.4 * half) if beard else ():
            self.part("hair", _at("circle", x + dx, mouth + 0.08 * r, 0.62 * half, 0.36 * r), 1, 1.14)
        self.thread(((x, nose), (x, mouth - 0.06 * r)))
        for side in (-1, 1):
            self.thread(_at("smile", x, mouth, side * r, r))
        n = 0.2 * r
        self.blob(_at("nose", x, nose, n, n), PALETTE["brown-nose" if "brown-nose" in b.extras else "nose"])
        self.oval(x - 0.3 * n, nose - 0.35 * n, 0.32 * n, 0.18 * n, PALETTE["nose-shine"])


def _at(shape, x, y, rx, ry):
    return [(x + u * rx, y + v * ry + rest) for u, v, rest in _SHAPES[shape]]


def _rounded(points):
    return [(round(x), round(y)) for x, y in points]


def _shade(colour, factor):
    return tuple(max(0, min(255, int(channel * factor))) for channel in colour)
