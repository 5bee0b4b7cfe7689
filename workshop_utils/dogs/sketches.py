"""Dogs drawn by code: a breed's traits and a seed become a picture-book sketch, the same on every machine."""

import time
from collections.abc import Iterable
from contextlib import suppress
from io import BytesIO
from itertools import product
from pathlib import Path
from random import Random

from PIL import Image, ImageChops

from workshop_utils.dogs.breeds import BREEDS, Breed, find_breed
from workshop_utils.dogs.drawing import PALETTE, TABLES, TOYS, shade
from workshop_utils.dogs.poses import Dog
from workshop_utils.progress import bar
from workshop_utils.storage import local_path, whole_file

# It is in the folder names of sketches. Raise it when the drawings change, or people keep the old ones.
DRAWING_VERSION = 1
LIGHTS = ("day", "dusk")
DUSK = (0.36, 0.37, 0.45)  # the share of red, green and blue that is left
GRAIN = 30  # the sensor adds noise from -30 to 30


def draw_dog(breed: Breed | str, seed: int, size: int = 224, light: str = "day") -> Image.Image:
    """Draw one dog.

    breed: a `Breed`, a folder ("n02085620-Chihuahua"), a WordNet id or a name; anything else raises ValueError.
    seed: picks pose, place, brightness and background; the same seed gives the same pixels everywhere.
    light: "day", or "dusk": the same dog as a camera sees it in a third of the light: dark, bluish and grainy.
    Returns an RGB image of `size` × `size` pixels; `size` under 16 or another light raises ValueError.

    >>> draw_dog("pug", seed=1, size=64).size
    (64, 64)
    """
    if size < 16:
        raise ValueError(f"size is {size}: a sketch needs at least 16 pixels a side, for example size=224.")
    if light not in LIGHTS:
        raise ValueError(f"light is {light!r}: write 'day' or 'dusk'.")
    dog = Dog(find_breed(breed), seed, size)
    dog.ground = _scenery(dog)
    # Poses that fill the middle of the picture are rarer.
    dog.pick((dog.stand, dog.stand, dog.sit, dog.lie, dog.lie, dog.portrait))()
    _foreground(dog)
    image = dog.finish()
    return image if light == "day" else _at_dusk(image, Random(f"{dog.breed.wnid}/{seed}/dusk"))


def write_sketches(
    folder: str | Path,
    per_breed: int,
    breeds: Iterable[Breed | str] | None = None,
    size: int = 224,
    *,
    first_seed: int = 0,
    light: str = "day",
) -> int:
    """Write sketches below `folder`, as `<wnid>-<Breed_name>/` `<wnid>_<seed>.jpg`; return how many were written.

    per_breed: seeds `first_seed` to `first_seed + per_breed - 1` of each breed; files that exist are left alone.
    breeds: None for all 120. breeds, size and light are as in `draw_dog`.

    A file appears whole or not at all, so a run that was killed can be started again.
    """
    folder = local_path(folder)
    for part in folder.glob("*/*.part"):
        with suppress(OSError):  # another process deleted it, or nobody may
            if time.time() - part.stat().st_mtime > 60:  # a killed run left it; another run may be writing a newer one
                part.unlink()
    wanted = product(map(find_breed, BREEDS if breeds is None else breeds), range(first_seed, first_seed + per_breed))
    paths = [(breed, seed, Path(folder, breed.folder, f"{breed.wnid}_{seed}.jpg")) for breed, seed in wanted]
    missing = [sketch for sketch in paths if not sketch[-1].exists()]
    for breed, seed, path in bar(missing, desc="drawing sketches"):
        draw_dog(breed, seed, size, light).save(jpeg := BytesIO(), "JPEG", quality=88)
        with whole_file(path) as part:
            part.write_bytes(jpeg.getvalue())  # Pillow does not notice that a disk is full
    return len(missing)


def _at_dusk(image, chance):
    dark = image.point([round(value * share) for share in DUSK for value in range(256)])
    noise = Image.frombytes("RGB", image.size, chance.randbytes(3 * image.width * image.height))
    grain = noise.point([value * 2 * GRAIN // 255 for value in range(256)] * 3)
    return ImageChops.add(dark, grain, offset=-GRAIN)


def _scenery(canvas):
    # Paints what is behind the dog and on the ground; returns the colour of the ground.
    sky, low_sky, ground, near_ground, horizon, far, near = canvas.pick(TABLES["scenes"])
    gain = [canvas.between(0.82, 1.12) for _ in range(3)]
    side, edge = canvas.side, round(canvas.side * (horizon + canvas.between(-0.08, 0.08)))
    rows = [
        [min(int((a + (b - a) * i // max(n - 1, 1)) * g), 255) for a, b, g in zip(top, foot, gain, strict=True)]
        for top, foot, n in ((sky, low_sky, edge), (ground, near_ground, side - edge))
        for i in range(n)
    ]
    strip = Image.frombytes("RGB", (1, side), bytes(channel for row in rows for channel in row))
    backdrop = strip.resize((side, side), Image.Resampling.NEAREST)
    canvas.image.paste(backdrop)
    _strew(canvas, far)
    canvas.image.paste(backdrop.crop((0, edge, side, side)), (0, edge))
    _strew(canvas, near)
    return tuple(rows[(edge + side) // 2])


def _strew(canvas, kinds):
    side, draw = canvas.side, canvas.draw
    for kind in [name for name in kinds for _ in range(TABLES["things"][name]["n"])]:
        thing = TABLES["things"][kind]
        x, y, r = side * canvas.chance(), side * canvas.between(*thing["y"]), side * canvas.between(*thing["r"])
        left, top, right, foot = box = tuple(map(round, (x - r, y - r * thing["tall"], x + r, y + r * thing["tall"])))
        tint = shade(thing["colour"], canvas.between(0.88, 1.06))
        if kind == "firs":
            for k in range(3):
                base, slim = foot - (foot - top) * k // 4, round(r * k / 6)
                cone = (left + slim, base), (right - slim, base), (round(x), top)
                draw.polygon(cone, fill=shade(tint, 1 + 0.08 * k))
        elif kind == "frame":
            m = round(r / 4)
            draw.rectangle(box, fill=tint)
            draw.rectangle((left + m, top + m, right - m, foot - m), fill=PALETTE["passe-partout"])
            draw.ellipse((left + 2 * m, round(y), right - 2 * m, foot - 2 * m), fill=canvas.pick(TOYS))
        else:
            draw.ellipse(box, fill=tint)


def _foreground(canvas):
    side, draw = canvas.side, canvas.draw
    kind, colour = canvas.pick(("ball", "bone", "bowl", "grass", "none", "none")), canvas.pick(TOYS)
    x, y, r = (round(side * canvas.between(*span)) for span in ((0.08, 0.92), (0.88, 0.96), (0.04, 0.07)))
    if kind == "ball":
        draw.circle((x, y), r, fill=colour)
        draw.arc((x - 2 * r, y - r, x, y + r), -50, 50, fill=PALETTE["stitch"], width=max(r // 5, 2))
        draw.ellipse((x - r // 8, y - r * 3 // 4, x + r // 2, y - r // 3), fill=shade(colour, 1.4))
    elif kind == "bone":
        for end in product((x - r, x + r), (round(y - 0.3 * r), round(y + 0.3 * r))):
            draw.circle(end, round(0.4 * r), fill=PALETTE["bone"])
        draw.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill=PALETTE["bone"])
    elif kind == "bowl":
        rim, base, wide = y - r // 2, y + r // 2, r * 3 // 2
        draw.polygon(((x - r, rim), (x + r, rim), (x + wide, base), (x - wide, base)), fill=colour)
        food = PALETTE["food"]
        draw.ellipse((x - r, y - r * 3 // 4, x + r, y - r // 4), fill=food, outline=shade(colour, 0.8), width=3)
    elif kind == "grass":
        for _ in range(16):
            x, tall = canvas.count(side), round(side * canvas.between(0.05, 0.13))
            tip = (x + canvas.count(tall // 2) - tall // 4, side - tall)
            blade = (x - tall // 8, side), (x + tall // 8, side), tip
            draw.polygon(blade, fill=shade(PALETTE["grass"], canvas.between(0.7, 1.2)))
