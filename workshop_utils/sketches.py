"""Dogs drawn by code: a breed's traits and a seed become a picture-book sketch, the same on every machine.

Every coordinate is an integer before Pillow sees it, every draw of chance comes from `Random.random`, and the only
resampling is a 2 × 2 mean, so that no processor, library version or thread count can change a pixel.
"""

import difflib
import math
import os
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

from workshop_utils.breeds import BREEDS, Breed

PALETTE = {
    "apricot": (232, 172, 112), "black": (44, 42, 48), "brown": (122, 82, 54), "charcoal": (78, 80, 90),
    "chestnut": (140, 76, 42), "cream": (242, 226, 194), "fawn": (214, 172, 122), "gold": (216, 156, 74),
    "grey": (134, 138, 146), "liver": (92, 56, 42), "mahogany": (118, 42, 26), "mouse": (158, 144, 136),
    "mustard": (206, 170, 92), "pink": (226, 172, 160), "red": (186, 92, 44), "rust": (160, 86, 40),
    "sable": (150, 108, 66), "sand": (202, 182, 150), "silver": (184, 188, 194), "skin": (120, 104, 106),
    "slate": (88, 102, 124), "steel": (106, 106, 112), "tan": (196, 134, 74), "wheat": (232, 202, 148),
    "white": (248, 245, 238),
}

# A word of a breed's pattern -> ovals (part, colour, x, y, rx, ry), in units of half the part's bounding box.
# On skull, muzzle and front an oval that is not in the middle has a twin on the other side.
MARKS = {
    "belly": (
        ("side", "light", 0, 1.1, 1.1, 0.6), ("front", "light", 0, 0.2, 0.5, 0.9), ("muzzle", "light", 0, 0.5, 2, 0.9),
    ),
    "bib": (("side", "light", 1, 0.25, 0.3, 0.8), ("front", "light", 0, -0.35, 0.42, 0.75)),
    "blaze": (
        ("skull", "light", 0, -0.4, 0.17, 0.8), ("skull", "light", 0, 0.6, 0.45, 0.4), ("muzzle", "light", 0, 0, 2, 2),
    ),
    "blaze-top": (("skull", "light", 0, -0.6, 0.15, 0.55),),
    "brush": (("tail", "mark", 0, 0, 2, 2),),
    "cap": (("skull", "mark", 0, -0.85, 1.1, 0.6), ("ear", "mark", 0, 0, 2, 2), ("side", "mark", -0.1, -0.8, 0.9, 0.6)),
    "ears": (("ear", "mark", 0, 0, 2, 2),),
    "legs": (("leg", "mark", 0, 0.3, 2, 1),),
    "mask": (("muzzle", "mark", 0, 0.2, 2, 1.1), ("skull", "mark", 0, 0.4, 0.5, 0.42)),
    "mask-eyes": (("skull", "mark", 0.5, -0.1, 0.34, 0.4),),
    "muzzle": (("muzzle", "light", 0, 0, 2, 2),),
    "points": (
        ("leg", "mark", 0, 1, 2, 1.1), ("front", "mark", 0.26, -0.2, 0.2, 0.13), ("side", "mark", 1, 0.2, 0.22, 0.4),
        ("skull", "mark", 0.38, -0.42, 0.15, 0.12), ("muzzle", "mark", 0.8, 0.4, 0.6, 1),
        ("skull", "mark", 0.65, 0.6, 0.35, 0.35),
    ),
    "ridge": (("side", "mark", -0.1, -0.95, 0.7, 0.2), ("skull", "mark", 0, -0.8, 0.12, 0.3)),
    "ruff": (
        ("neck", "light", 0, 0, 2, 2), ("front", "light", 0, -0.7, 0.9, 0.6), ("side", "light", 0.85, 0, 0.35, 1.2),
    ),
    "saddle": (
        ("side", "mark", -0.15, -0.7, 0.85, 0.95), ("front", "mark", 0.95, 0, 0.45, 1.1),
        ("skull", "mark", 0, -1, 0.55, 0.3), ("tail", "mark", 0, -0.2, 1, 0.8),
    ),
    "sides": (("skull", "mark", 0.75, -0.25, 0.55, 0.85),),
    "socks": (("leg", "light", 0, 1, 2, 0.5),),
    "specs": (("skull", "light", 0.45, 0.05, 0.4, 0.4),),
    "stripe": (("skull", "light", 0, -0.3, 0.09, 0.75),),
    "tip": (("tail", "light", -0.8, 0, 0.7, 2),),
    "urajiro": (
        ("skull", "light", 0.45, 0.4, 0.5, 0.55), ("muzzle", "light", 0, 0, 2, 2), ("leg", "light", 0, 0.5, 2, 1),
        ("skull", "light", 0.36, -0.4, 0.16, 0.15), ("side", "light", 0.2, 1, 1, 0.55),
        ("front", "light", 0, 0, 0.5, 1), ("neck", "light", 0, 0.5, 0.6, 0.6),
    ),
}

# A word -> ovals strewn over body, neck and legs: (count, smallest and largest radius, tallness, colours).
STREWN = {
    "blots": (9, 0.1, 0.26, 1, ("mark",)),
    "brindle": (14, 0.05, 0.08, 7, ("mark",)),
    "merle": (12, 0.08, 0.2, 1, ("mark", "light")),
    "patches": (4, 0.25, 0.45, 1, ("mark",)),
    "ticks": (34, 0.03, 0.055, 1, ("mark",)),
}

# Ear -> (drawn behind the skull, outline of the right ear in units of the skull's half-height).
EARS = {
    "bat": (True, ((0.2, -0.6), (0.35, -1.3), (0.7, -1.9), (1.1, -1.75), (1.12, -1), (0.9, -0.3))),
    "button": (False, ((0.3, -0.88), (0.75, -1.08), (1.05, -0.72), (1.02, -0.25), (0.78, -0.08), (0.55, -0.5))),
    "drop": (False, ((0.5, -0.85), (0.95, -0.85), (1.25, -0.4), (1.3, 0.2), (1.08, 0.55), (0.86, 0.15), (0.78, -0.35))),
    "fringed": (True, ((0.3, -0.6), (0.6, -1.5), (1.15, -1.8), (1.6, -1.25), (1.6, -0.5), (1.2, -0.05), (0.8, -0.2))),
    "long": (False, ((0.55, -0.7), (0.98, -0.65), (1.28, 0), (1.45, 0.75), (1.2, 1.3), (0.88, 0.95), (0.8, 0.2))),
    "prick": (True, ((0.2, -0.6), (0.45, -1.25), (0.78, -1.8), (0.98, -1.2), (0.95, -0.35), (0.6, -0.4))),
    "rose": (True, ((0.45, -0.7), (0.85, -1), (1.3, -0.95), (1.42, -0.6), (1.05, -0.45), (0.8, -0.35))),
    "tipped": (
        True, ((0.2, -0.6), (0.45, -1.2), (0.8, -1.5), (1.22, -1.25), (1.15, -0.95), (0.98, -0.9), (0.92, -0.35)),
    ),
}

# Tail -> the way it takes from its root, for a dog that faces right; then its width.
TAILS = {
    "curl": (((0, 0), (-0.16, -0.2), (-0.08, -0.44), (0.12, -0.4), (0.16, -0.26)), 0.075),
    "docked": (((0.05, 0.03), (-0.06, -0.06), (-0.1, -0.13)), 0.06),
    "plume": (((0.05, 0), (-0.2, -0.1), (-0.38, -0.06), (-0.55, 0.1)), 0.085),
    "ring": (((0, 0), (-0.12, -0.24), (0.04, -0.42), (0.2, -0.3), (0.1, -0.16), (0, -0.24)), 0.05),
    "sabre": (((0.05, 0), (-0.16, -0.06), (-0.32, -0.22), (-0.4, -0.44)), 0.055),
    "whip": (((0.05, 0), (-0.14, 0.12), (-0.26, 0.32), (-0.42, 0.36)), 0.04),
}

# Texture -> how far successive points of an outline stand out, in units of the fur's length.
TEXTURES = {
    "smooth": (0,), "plume": (0, 0.5, 1), "shaggy": (0, 1, 0.3), "wiry": (0, 0.8), "curly": (0, 0.8, 1, 0.8),
    "cords": (0, 1, 1, 0),
}

# Sky's top and foot, ground's top and foot, horizon, and what is strewn about.
SCENES = (
    ((120, 190, 240), (222, 240, 250), (150, 200, 96), (96, 156, 66), 0.62, ("clouds", "hills", "flowers")),
    ((250, 196, 140), (252, 228, 190), (190, 160, 92), (140, 120, 70), 0.66, ("sun", "hills")),
    ((70, 74, 130), (236, 150, 140), (84, 92, 96), (50, 60, 70), 0.64, ("moon", "stars", "firs")),
    ((140, 176, 214), (204, 222, 240), (246, 248, 252), (214, 224, 238), 0.6, ("firs", "flakes")),
    ((130, 206, 232), (206, 238, 244), (242, 222, 172), (222, 192, 132), 0.64, ("sun", "sea", "pebbles")),
    ((244, 214, 206), (248, 228, 218), (190, 136, 92), (150, 100, 66), 0.7, ("dots", "rug")),
    ((176, 206, 196), (196, 220, 210), (222, 202, 176), (190, 164, 134), 0.7, ("frame", "rug")),
    ((226, 206, 150), (240, 222, 176), (120, 96, 84), (90, 70, 62), 0.72, ("dots", "frame")),
    ((214, 130, 70), (250, 206, 130), (176, 112, 56), (130, 76, 44), 0.6, ("trees", "leaves")),
    ((60, 110, 96), (140, 186, 140), (70, 110, 66), (44, 76, 50), 0.58, ("trees", "flowers")),
    ((120, 128, 160), (176, 182, 204), (104, 110, 124), (74, 80, 94), 0.66, ("clouds", "pebbles")),
    ((190, 170, 226), (236, 214, 240), (130, 176, 140), (90, 136, 110), 0.62, ("clouds", "hills", "flowers")),
)

# Thing -> (count, colour, highest and lowest centre, smallest and largest half-width, height over width); the picture's
# side is 1.
THINGS = {
    "clouds": (7, (255, 255, 255), 0.06, 0.3, 0.06, 0.14, 0.35),
    "dots": (26, (255, 246, 236), 0.02, 0.66, 0.012, 0.02, 1),
    "firs": (7, (52, 84, 84), 0.5, 0.62, 0.04, 0.07, 3),
    "flakes": (40, (255, 255, 255), 0, 1, 0.006, 0.014, 1),
    "flowers": (26, (250, 220, 120), 0.68, 1, 0.008, 0.016, 0.8),
    "frame": (2, (132, 92, 66), 0.2, 0.4, 0.08, 0.13, 1.2),
    "hills": (4, (132, 176, 120), 0.62, 0.68, 0.2, 0.4, 0.3),
    "leaves": (30, (226, 150, 50), 0.1, 1, 0.01, 0.02, 0.7),
    "moon": (1, (250, 244, 214), 0.1, 0.25, 0.05, 0.08, 1),
    "pebbles": (14, (170, 158, 140), 0.7, 1, 0.012, 0.03, 0.6),
    "rug": (1, (176, 84, 84), 0.88, 0.92, 0.4, 0.55, 0.24),
    "sea": (3, (70, 150, 190), 0.63, 0.64, 0.5, 0.6, 0.07),
    "stars": (24, (255, 250, 220), 0, 0.4, 0.004, 0.008, 1),
    "sun": (1, (255, 240, 170), 0.1, 0.35, 0.07, 0.11, 1),
    "trees": (6, (70, 120, 70), 0.36, 0.5, 0.1, 0.18, 1.3),
}

TOY_COLOURS = (
    (214, 60, 60), (60, 110, 200), (70, 160, 100), (240, 180, 50), (150, 90, 180), (240, 130, 160), (60, 180, 190),
)


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
    easel = _Easel(find_breed(breed), seed, size)
    easel.scenery()
    _POSES[easel.count(len(_POSES))](easel)
    easel.foreground()
    return easel.finish()


def write_sketches(folder, per_breed: int, breeds=None, size: int = 224, *, first_seed: int = 0) -> int:
    """Write sketches as `<folder>/<wnid>-<Breed_name>/<wnid>_<seed>.jpg` and return how many were written.

    per_breed: seeds `first_seed` to `first_seed + per_breed - 1` of each breed; files that exist are left alone.
    breeds: what `draw_dog` takes, all 120 by default.
    A file appears whole or not at all, so that a run which was killed can be started again.
    """
    written = 0
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


def find_breed(breed: Breed | str) -> Breed:
    """Return the `Breed` that a folder, a WordNet id or a name (in any case, spaces or underscores) stands for.

    >>> find_breed("toy poodle").folder
    'n02113624-toy_poodle'
    """
    if isinstance(breed, Breed):
        return breed
    known = {word.lower(): known for known in BREEDS for word in (known.name, known.wnid, known.folder)}
    wanted = str(breed).lower().replace(" ", "_")
    if wanted in known:
        return known[wanted]
    close = [known[word].folder for word in difflib.get_close_matches(wanted, known, n=3)]
    raise ValueError(
        f"no breed is called {breed!r}. "
        + (f"Did you mean {' or '.join(dict.fromkeys(close))}? " if close else "")
        + "Take a name from workshop_utils.breeds.BREEDS, for example 'n02085620-Chihuahua'."
    )


class _Easel:
    """A picture twice the wanted size, a source of chance, and the brushes that a pose is painted with."""

    def __init__(self, breed, seed, size):
        self.breed, self.side = breed, 2 * size
        self.chance = Random(f"{breed.wnid}/{seed}").random
        self.image = Image.new("RGB", (self.side, self.side))
        self.draw = ImageDraw.Draw(self.image)
        self.under = Image.new("RGB", (self.side, self.side))  # marks are painted here, then cut out by `stencil`
        self.under_draw = ImageDraw.Draw(self.under)
        self.stencil = Image.new("1", (self.side, self.side))
        self.stencil_draw = ImageDraw.Draw(self.stencil)
        tone, warm = self.between(0.86, 1.1), self.between(-9, 9)
        self.colours = {
            part: _shade((PALETTE[name][0] + warm, PALETTE[name][1], PALETTE[name][2] - warm), tone)
            for part, name in (("coat", breed.coat), ("mark", breed.mark), ("light", breed.light))
        }

    def between(self, low, high):
        return low + (high - low) * self.chance()

    def count(self, n):
        return int(n * self.chance())

    def place(self, left, top, right, fill=0.9):
        """Choose where model coordinates (x to the right, y down, the ground at 0) go on the picture."""
        self.scale = self.side * min(fill / (right - left), fill / -top) * self.between(0.62, 1)
        flip, tilt = (1, -1)[self.count(2)], self.between(-0.07, 0.07)
        self.cos, self.sin, self.flip = self.scale * math.cos(tilt), self.scale * math.sin(tilt), flip
        slack = max(self.side - self.scale * (right - left), 0) * 0.48
        self.x0 = self.side / 2 - flip * self.scale * (left + right) / 2 + self.between(-slack, slack)
        self.y0 = self.side * self.between(0.9, 0.97)

    def pixels(self, points):
        """Model coordinates -> picture coordinates, not yet rounded."""
        cos, sin, flip, x0, y0 = self.cos, self.sin, self.flip, self.x0, self.y0
        return [(x0 + flip * (x * cos - y * sin), y0 + x * sin + y * cos) for x, y in points]

    def outline(self, points, fur=0.0):
        """A closed Catmull-Rom curve through model `points`, ruffled by the coat; integer pixels."""
        p = self.pixels(points)
        curve = []
        for i in range(len(p)):
            (ax, ay), (bx, by), (cx, cy), (dx, dy) = p[i - 1], p[i], p[(i + 1) % len(p)], p[(i + 2) % len(p)]
            for a, b, c, d in _SPLINE:
                curve.append((a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy))
        if not fur:
            return [(round(x), round(y)) for x, y in curve]
        return self.ruffled(curve, fur * self.breed.fur * self.scale * 0.055)

    def ruffled(self, curve, length):
        mx, my = sum(x for x, _ in curve) / len(curve), sum(y for _, y in curve) / len(curve)
        steps, droop = TEXTURES[self.breed.texture], 0.4 * length
        tufts = []
        for i, (x, y) in enumerate(curve):
            out = steps[i % len(steps)] * self.between(0.7, 1.3) * length
            reach = out / (abs(x - mx) + abs(y - my) + 1)
            tufts.append((round(x + (x - mx) * reach), round(y + (y - my) * reach + (droop if out else 0))))
        return tufts

    def blob(self, points, colour, line=0.8):
        """A filled smooth shape with a darker edge; `line` 0 leaves the edge out."""
        curve = self.outline(points)
        self.draw.polygon(curve, fill=colour)
        if line:
            self.draw.line(curve + curve[:1], fill=_shade(colour, line), width=max(self.side // 180, 1))

    def oval(self, x, y, rx, ry, colour, line=0.0):
        self.blob([(x + rx * u, y + ry * v) for u, v in _CIRCLE], colour, line=line)

    def part(self, name, points, fur=0.0, tone=1.0, edge=1.0):
        """A part of the dog in coat colour, with the breed's marks and fur strokes cut to its shape."""
        curve = self.outline(points, fur)
        coat = _shade(self.colours["coat"], tone)
        box = self.box(curve)
        marks = [mark for word in self.breed.pattern for mark in MARKS.get(word, ()) if mark[0] == name]
        self.draw.polygon(curve, fill=coat)
        if box and (marks or self.strewn(name) or self.breed.fur):
            self.under.paste(coat, box)
            self.marks(points, marks, name, tone)
            self.strokes(box, fur)
            self.stencil.paste(0, box)
            self.stencil_draw.polygon(curve, fill=1)
            self.image.paste(self.under.crop(box), box, self.stencil.crop(box))
        keep = curve[: max(int(len(curve) * edge), 2)]
        dark = _shade(coat, 0.74) if sum(coat) > 190 else _shade(coat, 1.5)
        self.draw.line(keep + curve[:1] if edge == 1 else keep, fill=dark, width=max(self.side // 180, 1))

    def box(self, curve):
        xs, ys = [x for x, _ in curve], [y for _, y in curve]
        left, top, right, foot = min(xs), min(ys), max(xs) + 1, max(ys) + 1
        box = max(left, 0), max(top, 0), min(right, self.side), min(foot, self.side)
        return box if box[0] < box[2] and box[1] < box[3] else None

    def strewn(self, name):
        words = self.breed.pattern if name in ("side", "front", "leg", "neck") else ()
        return [STREWN[word] for word in words if word in STREWN]

    def marks(self, points, marks, name, tone):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        mx, my = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
        hx, hy = (max(xs) - min(xs)) / 2, (max(ys) - min(ys)) / 2
        for n, low, high, tall, colours in self.strewn(name):
            for i in range(n if name in ("side", "front") else n // 3):
                r, x, y = self.between(low, high) * 0.45, self.between(-1, 1) * hx, self.between(-1, 1) * hy
                self.fleck(mx + x, my + y, r, r * tall, _shade(self.colours[colours[i % len(colours)]], tone))
        for _, colour, x, y, rx, ry in marks:
            for x in {x, -x} if name in ("skull", "muzzle", "front") else {x}:
                self.fleck(mx + x * hx, my + y * hy, rx * hx, ry * hy, _shade(self.colours[colour], tone))

    def fleck(self, x, y, rx, ry, colour):
        curve = self.pixels([(x + rx * u, y + ry * v) for u, v in _RING])
        self.under_draw.polygon([(round(x), round(y)) for x, y in curve], fill=colour)

    def strokes(self, box, fur):
        """Short hairs over a part: down for long coats, any way for wire, small arcs for curls."""
        left, top, right, foot = box
        if not fur or right - left < 4 or foot - top < 4:
            return
        texture, unit = self.breed.texture, self.scale * 0.05
        for i in range(min(int((right - left) * (foot - top) / (unit * unit * 3)), 120)):
            x, y = left + self.count(right - left), top + self.count(foot - top)
            tone = _shade(self.under.getpixel((x, y)), (0.84, 1.16)[i % 2])
            if texture == "curly":
                r = round(unit * 0.7)
                self.under_draw.arc((x - r, y - r, x + r, y + r), 20, 250, fill=tone, width=2)
            else:
                long = unit * (2.6 if texture == "cords" else 0.5 + self.breed.fur)
                lean = self.between(-1, 1) * (0.9 if texture == "wiry" else 0.3)
                width = max(self.side // (70 if texture == "cords" else 200), 1)
                self.under_draw.line((x, y, round(x + lean * long), round(y + long)), fill=tone, width=width)

    def limb(self, path, width):
        """The outline of a stroke along `path` that thins towards its end, as model points."""
        left, right = [], []
        for i, (x, y) in enumerate(path):
            (ax, ay), (bx, by) = path[max(i - 1, 0)], path[min(i + 1, len(path) - 1)]
            length = math.sqrt((bx - ax) ** 2 + (by - ay) ** 2) or 1.0
            half = width * (1 - 0.25 * i / (len(path) - 1))
            left.append((x - (by - ay) / length * half, y + (bx - ax) / length * half))
            right.append((x + (by - ay) / length * half, y - (bx - ax) / length * half))
        return left + right[::-1]

    def thread(self, points):
        colour = self.colours["coat"]
        line = [(round(x), round(y)) for x, y in self.pixels(points)]
        dark = _shade(colour, 0.45) if sum(colour) > 190 else (20, 16, 18)
        self.draw.line(line, fill=dark, width=max(self.side // 150, 1))

    def tail(self, x, y):
        path, width = TAILS[self.breed.tail]
        size = self.between(0.85, 1.1)
        path = [(x + u * size, min(y + v * size, -0.04)) for u, v in path]
        shape = self.limb(path, width * (1 + 0.5 * self.breed.fur))
        self.part("tail", shape, 1.6 if self.breed.tail == "plume" else 1)

    def collar(self, x, y, half, tilt=0.0):
        """A collar with a tag, a bandana, or nothing."""
        kind, colour = self.count(4), TOY_COLOURS[self.count(len(TOY_COLOURS))]
        if kind == 0:
            return
        if kind == 1:
            corners = [(x - half, y - 0.05), (x, y + 0.02), (x + half, y - 0.05 + tilt), (x + 0.04, y + half * 1.1)]
            self.blob(corners, colour)
        top = [(x - half, y - 0.04), (x, y + 0.02), (x + half, y - 0.04 + tilt)]
        self.blob(top + [(u, v + 0.07) for u, v in top[::-1]], colour)
        if kind > 1:
            self.oval(x, y + 0.12, 0.045, 0.045, (244, 206, 90), line=0.8)

    def scenery(self):
        """Sky, what stands before it, the ground over its feet, and what lies about."""
        sky, low_sky, ground, near, horizon, things = SCENES[self.count(len(SCENES))]
        gain = [self.between(0.82, 1.12) for _ in range(3)]
        edge = round(self.side * (horizon + self.between(-0.08, 0.08)))
        rows = _gradient(sky, low_sky, edge) + _gradient(ground, near, self.side - edge)
        rows = [tuple(min(int(c * g), 255) for c, g in zip(row, gain, strict=True)) for row in rows]
        strip = Image.frombytes("RGB", (1, self.side), bytes(c for row in rows for c in row))
        backdrop = strip.resize((self.side, self.side), Image.Resampling.NEAREST)
        self.ground = rows[(edge + self.side) // 2]
        self.image.paste(backdrop)
        for thing in things:
            if THINGS[thing][3] < 0.7:
                self.strew(thing, *THINGS[thing])
        self.image.paste(backdrop.crop((0, edge, self.side, self.side)), (0, edge))
        for thing in things:
            if THINGS[thing][3] >= 0.7:
                self.strew(thing, *THINGS[thing])

    def strew(self, thing, n, colour, high, low, small, large, tall):
        for _ in range(n):
            x, y, r = (self.side * v for v in (self.chance(), self.between(high, low), self.between(small, large)))
            left, top, right, foot = round(x - r), round(y - r * tall), round(x + r), round(y + r * tall)
            tint = _shade(colour, self.between(0.88, 1.06))
            if thing == "firs":
                for k, light in enumerate((1, 1.08, 1.16)):
                    base, slim = foot - (foot - top) * k // 4, round(r * k / 6)
                    cone = ((left + slim, base), (right - slim, base), (round(x), top))
                    self.draw.polygon(cone, fill=_shade(tint, light))
            elif thing == "frame":
                m = round(r / 4)
                self.draw.rectangle((left, top, right, foot), fill=tint)
                self.draw.rectangle((left + m, top + m, right - m, foot - m), fill=(250, 244, 230))
                box = (left + 2 * m, round(y), right - 2 * m, foot - 2 * m)
                self.draw.ellipse(box, fill=TOY_COLOURS[self.count(len(TOY_COLOURS))])
            else:
                self.draw.ellipse((left, top, right, foot), fill=tint)

    def shadow(self, x, half):
        self.oval(x, -0.01, half, 0.09, _shade(self.ground, 0.74))

    def foreground(self):
        """Sometimes a ball, a bone, a bowl or grass in front of the dog."""
        kind, colour = self.count(6), TOY_COLOURS[self.count(len(TOY_COLOURS))]
        places = self.between(0.08, 0.92), self.between(0.88, 0.96), self.between(0.04, 0.07)
        x, y, r = (round(self.side * v) for v in places)
        if kind < 3:
            (self.ball, self.bone, self.bowl)[kind](x, y, r, colour)
        elif kind == 3:
            self.grass()

    def ball(self, x, y, r, colour):
        self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        self.draw.arc((x - 2 * r, y - r, x, y + r), -50, 50, fill=(255, 250, 240), width=max(r // 5, 2))
        self.draw.ellipse((x - r // 8, y - r * 3 // 4, x + r // 2, y - r // 3), fill=_shade(colour, 1.4))

    def bone(self, x, y, r, _):
        k = round(r * 0.4)
        for u, v in ((-1, -0.3), (-1, 0.3), (1, -0.3), (1, 0.3)):
            a, b = round(x + u * r), round(y + v * r)
            self.draw.ellipse((a - k, b - k, a + k, b + k), fill=(250, 244, 228))
        self.draw.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill=(250, 244, 228))

    def bowl(self, x, y, r, colour):
        wide, half = r * 3 // 2, r // 2
        side = ((x - r, y - half), (x + r, y - half), (x + wide, y + half), (x - wide, y + half))
        self.draw.polygon(side, fill=colour)
        food = (x - r, y - r * 3 // 4, x + r, y - r // 4)
        self.draw.ellipse(food, fill=(140, 90, 60), outline=_shade(colour, 0.8), width=3)

    def grass(self):
        for _ in range(16):
            x, tall = self.count(self.side), round(self.side * self.between(0.05, 0.13))
            tip = (x + self.count(tall // 2) - tall // 4, self.side - tall)
            blade = ((x - tall // 8, self.side), (x + tall // 8, self.side), tip)
            self.draw.polygon(blade, fill=_shade((96, 150, 70), self.between(0.7, 1.2)))

    def finish(self):
        """Shrink 2 × 2 to 1 and tint the light."""
        warm, bright = self.between(-0.1, 0.1), self.between(0.76, 1.14)
        table = [min(int(v * bright * g), 255) for g in (1 + warm, 1, 1 - warm) for v in range(256)]
        return self.image.reduce(2).point(table)

    def leg(self, x, top, width, hind=False, tone=1.0):
        """One leg from `top` to the ground; a hind leg has a thigh and a hock."""
        w, g = width, -top
        if hind:
            shape = [
                (-1.5, -g), (-1.45, -0.75 * g), (-1.5, -0.36 * g), (-0.8, -0.14 * g), (-0.9, 0), (0.9, 0), (1, -0.06),
                (0.1, -0.12), (-0.1, -0.36 * g), (1.1, -0.66 * g), (1.5, -g),
            ]
        else:
            shape = [
                (-1, -g), (-0.85, -0.5 * g), (-0.7, -0.1), (-0.75, 0), (1.15, 0), (1.2, -0.06), (0.75, -0.11),
                (0.75, -0.5 * g), (1, -g),
            ]
        self.part("leg", [(x + u * w, v) for u, v in shape], 0.6, tone, edge=0.86)
        if "pompoms" in self.breed.extras:
            self.part("pompom", _around(x - 0.1 * w, -0.15, 1.25 * w, 0.11), 1.2, tone)


def _stand(e):
    b = e.breed
    half, deep, legs = 0.5 * b.body, 0.15 + 0.09 * b.bulk, 0.16 + 0.4 * b.leg
    r, mid, w = 0.35 - 0.06 * b.leg, -legs - deep * 0.9, 0.085 * b.bulk + 0.02
    neck = 0.16 + 0.2 * b.leg
    hx, hy = half + 0.16, mid - deep - neck
    e.place(-half - 0.42, hy - 0.5, hx + 0.5)
    e.shadow(0, half + 0.2)
    e.tail(-half, mid - 0.55 * deep)
    e.leg(half * 0.92, mid + 0.2 * deep, w, tone=0.86)
    e.leg(-half * 0.62, mid + 0.1 * deep, w * 1.05, True, tone=0.86)
    tuck = 0.3 + 0.55 * min(max(b.bulk - 0.65, 0) / 0.5, 1)
    torso = [
        (-1.06, -0.3), (-0.85, -0.92), (-0.25, -0.9), (0.35, -0.95), (0.85, -1.1), (1.12, -0.4), (1.02, 0.55),
        (0.6, 1.05), (0, 0.9), (-0.55, tuck), (-0.95, 0.5),
    ]
    throat = [(half * 1.1, mid), (half * 0.8, mid + 0.3 * deep)]
    shoulder = [(half * 0.45, mid - 0.8 * deep), (hx - 0.22, hy + 0.1), (hx + 0.1, hy + 0.1), *throat]
    e.part("neck", shoulder, 0.6)
    e.part("side", [(half * x, mid + deep * y) for x, y in torso], 1)
    e.leg(-half * 0.82, mid + 0.1 * deep, w * 1.15, True)
    e.leg(half * 0.7, mid + 0.3 * deep, w)
    e.part("neck", shoulder, 0.6, edge=0.01)
    e.collar(hx - 0.08, hy + 0.3, 0.2, 0.06)
    _head(e, hx, hy, r, e.between(0.35, 0.9))


def _sit(e):
    b = e.breed
    wide, tall = 0.22 + 0.14 * b.bulk, 0.72 + 0.24 * b.leg
    r, lean = 0.41 - 0.06 * b.leg, e.between(-0.06, 0.06)
    hx, hy = lean, -tall - 0.2
    w = 0.075 * b.bulk + 0.02
    e.place(-wide - 0.4, hy - 0.58, wide + 0.4)
    e.shadow(0, wide + 0.28)
    e.tail(-wide - 0.02, -0.16)
    for side in (-1, 1):
        e.part("leg", _around(side * (wide + 0.03), -0.2, 0.17 * b.bulk + 0.04, 0.2), 0.8, 0.92)
        e.part("leg", _around(side * (wide + 0.09), -0.05, 0.13, 0.055), 0.2, 0.95)
    body = [(0, -tall - 0.1), (0.62, -tall), (0.84, -0.68 * tall), (1.02, -0.3), (0.8, -0.04), (0, -0.02)]
    e.part("front", _both_sides(body, lean * 0.5, 0, wide, 1), 1)
    for side in (-1, 1):
        x = side * wide * 0.42
        inner = [(-w, -0.5 * tall), (-0.85 * w, -0.1), (-1.15 * w, 0.01)]
        shape = [(x + u, v) for u, v in inner] + [(x - u, v) for u, v in inner[::-1]]
        e.part("leg", shape, 0.4, 1.03, edge=0.86)
    e.collar(hx, hy + 0.35, wide * 0.72)
    _head(e, hx, hy, r, e.between(-0.6, 0.6))


def _lie(e):
    b = e.breed
    half, deep = 0.42 + 0.22 * b.body, 0.17 + 0.08 * b.bulk
    r, w = 0.35 - 0.05 * b.leg, 0.05 + 0.035 * b.bulk
    hx, hy = half - 0.02, -2 * deep - 0.34
    reach = half + 0.2 + 0.14 * b.leg
    e.place(-half - 0.45, hy - 0.5, reach + 0.22, fill=0.94)
    e.shadow(0.05, half + 0.4)
    e.tail(-half, -deep)
    toes = [(reach, -0.13), (reach + 0.12, -0.08), (reach + 0.12, 0), (reach, 0)]
    paw = [(half * 0.5, -0.2), (half * 0.8, -0.2), *toes, (half * 0.4, 0)]
    e.part("leg", [(x + 0.08, y - 0.04) for x, y in paw], 0.4, 0.86)
    back = [(-1.05, -0.7), (-0.8, -1.6), (-0.2, -1.75), (0.4, -2), (0.8, -2.3)]
    torso = [*back, (1.05, -1.5), (0.95, -0.3), (0.5, 0), (-0.9, 0)]
    e.part("side", [(half * x, deep * y) for x, y in torso], 1)
    e.part("leg", _around(-half * 0.62, -deep * 0.78, 0.2 + 0.05 * b.bulk, deep * 0.78), 0.8, 1.03)
    e.part("leg", _around(-half * 0.42, -w, 0.2, w), 0.2, 1.03)
    e.part("leg", paw, 0.4, edge=0.8)
    e.collar(hx - 0.02, hy + 0.3, 0.2)
    _head(e, hx, hy, r, e.between(0.1, 0.8))


def _portrait(e):
    b = e.breed
    wide = 0.62 + 0.22 * b.bulk
    e.place(-1.2, -2.5, 1.2, fill=1.2)
    e.x0, e.y0 = e.side * e.between(0.3, 0.7), e.side * e.between(1.02, 1.16)
    bust = [(0, -1.1), (0.5, -0.95), (0.8, -0.6), (1, 0), (1, 0.4), (0, 0.4)]
    e.part("front", _both_sides(bust, 0, 0, wide, 1), 1)
    e.collar(0, -0.62, wide * 0.6)
    _head(e, e.between(-0.08, 0.08), -1.38, 0.68, e.between(-0.8, 0.8))


def _head(e, x, y, r, turn):
    """A face of half-height `r` about (x, y), looking `turn` (-1 to 1) to one side."""
    b = e.breed
    w = b.skull * r
    aim = turn * (0.16 + 0.3 * b.muzzle) * r  # how far the nose stands to one side
    if "mane" in b.extras:
        e.part("neck", _around(x, y + 0.25 * r, 1.4 * w, 1.3 * r), 1.3, 0.95)
    behind, _ = EARS[b.ear]
    if behind:
        _ears(e, x, y, r)
    half = [(0, -0.92), (0.5, -0.84), (0.88, -0.5), (0.98, 0), (0.8, 0.5), (0.42, 0.86), (0, 0.95)]
    e.part("skull", _both_sides(half, x, y, w, r), 0.7)
    if not behind:
        _ears(e, x, y, r)
    if "topknot" in b.extras:
        e.part("hair", _around(x, y - 0.85 * r, 0.62 * w, 0.34 * r), 1.2, 1.08)
    if "wrinkles" in b.extras:
        for v in (-0.5, -0.36):
            e.thread(((x - 0.26 * w, y + v * r), (x, y + (v - 0.07) * r), (x + 0.26 * w, y + v * r)))
    for side in (-1, 1):
        _eye(e, x + side * 0.42 * w + 0.5 * aim, y - 0.1 * r, 0.155 * r)
    _muzzle(e, x + aim, y, r, w, x + 0.5 * aim)
    _hair(e, x, y, r, aim)


_POSES = (_stand, _stand, _sit, _lie, _lie, _portrait)  # those that fill the middle of the picture are the rarer


def _ears(e, x, y, r):
    b = e.breed
    behind, shape = EARS[b.ear]
    w, inner = b.skull, _shade(_mix(e.colours["coat"], PALETTE["pink"]), 0.9)
    for side in (-1, 1):
        size, turn = b.ear_size * e.between(0.92, 1.08), e.between(-0.12, 0.12)
        points = []
        for u, v in shape:
            u, v = (u - 0.7) * size, (v + 0.55) * size
            points.append((x + side * (0.7 * w + u - v * turn) * r, y + (v - 0.55 + u * turn) * r))
        e.part("ear", points, 1.1 if b.texture in ("plume", "curly", "shaggy", "cords") else 0, 0.96 if behind else 0.9)
        if behind and b.ear != "rose":
            mx, my = sum(p for p, _ in points) / len(points), sum(q for _, q in points) / len(points)
            e.blob([(mx + 0.55 * (p - mx), my + 0.62 * (q - my)) for p, q in points], inner, line=0)


def _hair(e, x, y, r, aim):
    """Brows, a fringe over the eyes and a bow, for breeds that wear them."""
    w = e.breed.skull * r
    for side in (-1, 1):
        if "brows" in e.breed.extras:
            arch = [(0.2, 0), (0.42, -0.14), (0.76, 0), (0.82, 0.16), (0.42, 0.04)]
            e.part("hair", [(x + 0.5 * aim + side * u * w, y + (v - 0.4) * r) for u, v in arch], 0.5, 1.2)
        if "fringe" in e.breed.extras:
            e.part("hair", _around(x + side * 0.34 * w, y - 0.56 * r, 0.42 * w, 0.32 * r), 1, 1.06)
    if "bow" in e.breed.extras:
        for side in (-1, 1):
            e.oval(x + side * 0.16 * r, y - 0.95 * r, 0.17 * r, 0.12 * r, (226, 80, 110), line=0.8)


def _eye(e, x, y, r):
    iris = (150, 196, 226) if "blue-eyes" in e.breed.extras else (112, 66, 34)
    dark = sum(e.colours["coat"]) < 260
    e.oval(x, y, 1.16 * r, 1.2 * r, _shade(e.colours["coat"], 1.35 if dark else 0.6))
    e.oval(x, y, r, 1.06 * r, (36, 26, 24))
    e.oval(x, y + 0.12 * r, 0.78 * r, 0.8 * r, iris)
    e.oval(x, y, 0.56 * r, 0.62 * r, (20, 14, 14))
    e.oval(x + 0.3 * r, y - 0.36 * r, 0.3 * r, 0.3 * r, (255, 255, 255))
    e.oval(x - 0.3 * r, y + 0.4 * r, 0.14 * r, 0.14 * r, (240, 236, 230))


def _muzzle(e, x, y, r, w, bridge):
    """Bridge, lips, mouth and nose; `x` is the nose's place, `bridge` where it starts between the eyes."""
    b = e.breed
    half, nose = w * (0.62 - 0.2 * b.muzzle), y + (0.2 + 0.42 * b.muzzle) * r
    jowl = 1.18 if "jowls" in b.extras else 1.0
    beard = "beard" in b.extras
    mouth = nose + 0.36 * r
    if e.count(2):
        tongue = (120, 110, 170) if "blue-tongue" in b.extras else (236, 120, 130)
        e.oval(x, mouth + 0.06 * r, 0.28 * r, 0.24 * r, (110, 36, 40))
        e.oval(x, mouth + 0.2 * r, 0.17 * r, 0.24 * r, tongue, line=0.8)
    lips = [
        (bridge, y - 0.05 * r), (bridge + 0.2 * w, y + 0.05 * r), (x + half * 0.95, nose - 0.02 * r),
        (x + half * jowl, mouth - 0.1 * r), (x + 0.6 * half, mouth + 0.1 * r * jowl), (x, mouth),
    ]
    mirror = [(2 * (bridge if i == 1 else x) - u, v) for i, (u, v) in enumerate(lips)]
    e.part("muzzle", lips + mirror[-2:0:-1], 0.5 if beard else 0, 1.08)
    if beard:
        for side in (-1, 1):
            e.part("hair", _around(x + side * 0.4 * half, mouth + 0.08 * r, 0.62 * half, 0.36 * r), 1, 1.14)
    e.thread(((x, nose), (x, mouth - 0.06 * r)))
    for side in (-1, 1):
        smile = ((0, -0.06), (side * 0.2, 0.03), (side * 0.38, -0.06))
        e.thread([(x + u * r, mouth + v * r) for u, v in smile])
    colour, n = (110, 66, 56) if "brown-nose" in b.extras else (34, 28, 32), 0.2 * r
    e.blob(_both_sides([(0, -0.8), (1, -0.6), (0.7, 0.4), (0, 0.85)], x, nose, n, n), colour)
    e.oval(x - 0.3 * n, nose - 0.35 * n, 0.32 * n, 0.18 * n, (150, 140, 146))


def _shade(colour, factor):
    """Darken (`factor` below 1) or lighten a colour; integers from 0 to 255."""
    return tuple(max(0, min(255, int(channel * factor))) for channel in colour)


def _mix(a, b):
    return tuple((p + q) // 2 for p, q in zip(a, b, strict=True))


def _gradient(top, foot, rows):
    return [tuple(a + (b - a) * i // max(rows - 1, 1) for a, b in zip(top, foot, strict=True)) for i in range(rows)]


def _both_sides(half, x, y, rx, ry):
    """A symmetric outline about (x, y) from its right half, which begins and ends in the middle."""
    return [(x + u * rx, y + v * ry) for u, v in half] + [(x - u * rx, y + v * ry) for u, v in half[-2:0:-1]]


def _around(x, y, rx, ry):
    return [(x + rx * u, y + ry * v) for u, v in _CIRCLE]


_SPLINE = [  # Catmull-Rom weights of four neighbouring points at t = 0, 1/4, 1/2 and 3/4
    ((-t + 2 * t * t - t**3) / 2, (2 - 5 * t * t + 3 * t**3) / 2, (t + 4 * t * t - 3 * t**3) / 2, (t**3 - t * t) / 2)
    for t in (0.0, 0.25, 0.5, 0.75)
]
_CIRCLE = [(math.sin(math.pi * k / 6), -math.cos(math.pi * k / 6)) for k in range(12)]
_RING = [(math.sin(math.pi * k / 7), -math.cos(math.pi * k / 7)) for k in range(14)]
