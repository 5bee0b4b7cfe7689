"""A dog in one of four poses, built from the parts and lengths that its breed gives it."""

import math

from workshop_utils.dogs.drawing import TABLES, TOYS, Canvas, Colour, Points, at, shade

SIDES = (-1, 1)  # the dog's right, which is on the left of the picture, and its left


class Dog(Canvas):
    """A canvas that knows how a dog stands, sits, lies, and looks at you.

    ground: colour of the ground; the dog's shadow darkens it.
    """

    ground: Colour

    def stand(self) -> None:
        b = self.breed
        half, deep, legs = 0.5 * b.body, 0.15 + 0.09 * b.bulk, 0.16 + 0.4 * b.leg
        mid, w = -legs - deep * 0.9, 0.085 * b.bulk + 0.02
        hx, hy = half + 0.16, mid - deep - 0.16 - 0.2 * b.leg
        self.place(-half - 0.42, hy - 0.5, hx + 0.5)
        self.shadow(0, half + 0.2)
        self.tail(-half, mid - 0.55 * deep)
        self.leg("foreleg", half * 0.92, mid + 0.2 * deep, w, 0.86)
        self.leg("hind-leg", -half * 0.62, mid + 0.1 * deep, w * 1.05, 0.86)
        tuck = mid + deep * (0.3 + 0.55 * min(max(b.bulk - 0.65, 0) / 0.5, 1))
        throat = [(half * 1.1, mid), (half * 0.8, mid + 0.3 * deep)]
        neck = [(half * 0.45, mid - 0.8 * deep), (hx - 0.22, hy + 0.1), (hx + 0.1, hy + 0.1), *throat]
        self.part("neck", neck, 0.6)
        self.part("side", at("torso", 0, mid, half, deep) + [(-0.55 * half, tuck), (-0.95 * half, mid + 0.5 * deep)], 1)
        self.leg("hind-leg", -half * 0.82, mid + 0.1 * deep, w * 1.15)
        self.leg("foreleg", half * 0.7, mid + 0.3 * deep, w)
        self.part("neck", neck, 0.6, edge=0.01)
        self.collar(hx - 0.08, hy + 0.3, 0.2, 0.06)
        self.head(hx, hy, 0.35 - 0.06 * b.leg, self.between(0.35, 0.9))

    def sit(self) -> None:
        b = self.breed
        wide, tall, lean = 0.22 + 0.14 * b.bulk, 0.72 + 0.24 * b.leg, self.between(-0.06, 0.06)
        hy = -tall - 0.2
        self.place(-wide - 0.4, hy - 0.58, wide + 0.4)
        self.shadow(0, wide + 0.28)
        self.tail(-wide - 0.02, -0.16)
        for side in SIDES:
            self.part("leg", at("circle", side * (wide + 0.03), -0.2, 0.17 * b.bulk + 0.04, 0.2), 0.8, 0.92)
            self.part("leg", at("circle", side * (wide + 0.09), -0.05, 0.13, 0.055), 0.2, 0.95)
        self.part("front", at("sitting-body", lean * 0.5, 0, wide, tall), 1)
        for side in SIDES:
            leg = at("sitting-leg", side * wide * 0.42, 0, 0.075 * b.bulk + 0.02, tall)
            self.part("leg", leg, 0.4, 1.03, edge=0.86)
        self.collar(lean, hy + 0.35, wide * 0.72)
        self.head(lean, hy, 0.41 - 0.06 * b.leg, self.between(-0.6, 0.6))

    def lie(self) -> None:
        b = self.breed
        half, deep, w = 0.42 + 0.22 * b.body, 0.17 + 0.08 * b.bulk, 0.05 + 0.035 * b.bulk
        hx, hy, reach = half - 0.02, -2 * deep - 0.34, half + 0.2 + 0.14 * b.leg
        self.place(-half - 0.45, hy - 0.5, reach + 0.22, fill=0.94)
        self.shadow(0.05, half + 0.4)
        self.tail(-half, -deep)
        paw = [(half * 0.5, -0.2), (half * 0.8, -0.2), *at("toes", reach, 0, 1, 1), (half * 0.4, 0)]
        self.part("leg", [(x + 0.08, y - 0.04) for x, y in paw], 0.4, 0.86)
        self.part("side", at("lying-torso", 0, 0, half, deep), 1)
        self.part("leg", at("circle", -half * 0.62, -deep * 0.78, 0.2 + 0.05 * b.bulk, deep * 0.78), 0.8, 1.03)
        self.part("leg", at("circle", -half * 0.42, -w, 0.2, w), 0.2, 1.03)
        self.part("leg", paw, 0.4, edge=0.8)
        self.collar(hx - 0.02, hy + 0.3, 0.2)
        self.head(hx, hy, 0.35 - 0.05 * b.leg, self.between(0.1, 0.8))

    def portrait(self) -> None:
        wide = 0.62 + 0.22 * self.breed.bulk
        self.place(-1.2, -2.5, 1.2, fill=1.2)
        self.x0, self.y0 = self.side * self.between(0.3, 0.7), self.side * self.between(1.02, 1.16)
        self.part("front", at("bust", 0, 0, wide, 1), 1)
        self.collar(0, -0.62, wide * 0.6)
        self.head(self.between(-0.08, 0.08), -1.38, 0.68, self.between(-0.8, 0.8))

    def shadow(self, x: float, half: float) -> None:
        self.oval(x, -0.01, half, 0.09, shade(self.ground, 0.74))

    def leg(self, kind: str, x: float, top: float, width: float, tone: float = 1.0) -> None:
        self.part("leg", at(kind, x, 0, width, -top), 0.6, tone, edge=0.86)
        self.hair("pompoms", x, -0.15, width, 0.11, tone)

    def hair(self, word: str, x: float, y: float, rx: float, ry: float, tone: float = 1.0) -> None:
        """Paint the hair around (x, y) of a breed that has `word` among its extras."""
        for part, shape, u, v, wide, tall, fur, own in TABLES["hair"][word] if word in self.breed.extras else ():
            self.part(part, at(shape, x + u * rx, y + v * ry, wide * rx, tall * ry), fur, own * tone)

    def tail(self, x: float, y: float) -> None:
        tail, size = TABLES["tails"][self.breed.tail], self.between(0.85, 1.1)
        way = [(x + u * size, min(y + v * size, -0.04)) for u, v in tail["path"]]
        outline: Points = []
        for i, ((ax, ay), (x, y), (bx, by)) in enumerate(zip(way[:1] + way, way, way[1:] + way[-1:], strict=False)):
            half = tail["width"] * (1 + 0.5 * self.breed.fur) * (1 - 0.25 * i / (len(way) - 1))
            half /= math.sqrt((bx - ax) ** 2 + (by - ay) ** 2)
            u, v = (by - ay) * half, (bx - ax) * half
            outline[i:i] = (x - u, y + v), (x + u, y - v)  # one side on the way there, the other on the way back
        self.part("tail", outline, 1.6 if self.breed.tail == "plume" else 1)

    def collar(self, x: float, y: float, half: float, tilt: float = 0.0) -> None:
        kind, colour = self.pick(("none", "bandana", "tag", "tag")), self.pick(TOYS)
        top = [(x - half, y - 0.04), (x, y + 0.02), (x + half, y - 0.04 + tilt)]
        if kind == "bandana":
            self.blob([(x - half, y - 0.05), top[1], (x + half, y - 0.05 + tilt), (x + 0.04, y + half * 1.1)], colour)
        if kind != "none":
            self.blob(top + [(u, v + 0.07) for u, v in top[::-1]], colour)
        if kind == "tag":
            self.oval(x, y + 0.12, 0.045, 0.045, self.colours["tag"], line=0.8)

    def head(self, x: float, y: float, r: float, turn: float) -> None:
        """Paint a face of half-height `r` about (x, y), looking `turn` (-1 to 1) to one side."""
        b = self.breed
        w, behind = b.skull * r, TABLES["ears"][b.ear]["behind"]
        aim = turn * (0.16 + 0.3 * b.muzzle) * r  # how far the nose stands to one side
        self.hair("mane", x, y, w, r)
        if behind:
            self.ears(x, y, r)
        self.part("skull", at("skull", x, y, w, r), 0.7)
        if not behind:
            self.ears(x, y, r)
        self.hair("topknot", x, y, w, r)
        for v in (-0.5, -0.36) if "wrinkles" in b.extras else ():
            self.thread(at("wrinkle", x, y + v * r, w, r))
        for side in SIDES:
            self.ovals("eye", x + side * 0.42 * w + 0.5 * aim, y - 0.1 * r, 0.155 * r)
        self.muzzle(x + aim, y, r, w, x + 0.5 * aim)
        self.hair("brows", x + 0.5 * aim, y, w, r)
        self.hair("fringe", x, y, w, r)
        if "bow" in b.extras:
            self.ovals("bow", x, y, r)

    def ears(self, x: float, y: float, r: float) -> None:
        b, ear = self.breed, TABLES["ears"][self.breed.ear]
        fur, tone = 1.1 if b.texture in ("plume", "curly", "shaggy", "cords") else 0, 0.96 if ear["behind"] else 0.9
        inner = shade([(p + q) // 2 for p, q in zip(self.colours["coat"], self.colours["pink"], strict=True)], 0.9)
        for side in SIDES:
            size, turn = b.ear_size * self.between(0.92, 1.08), self.between(-0.12, 0.12)
            grown = [((u - 0.7) * size, (v + 0.55) * size) for u, v in ear["outline"]]
            points = [(x + side * (0.7 * b.skull + u - v * turn) * r, y + (v - 0.55 + u * turn) * r) for u, v in grown]
            self.part("ear", points, fur, tone)
            if ear["behind"] and b.ear != "rose":
                mx, my = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
                self.blob([(mx + 0.55 * (p - mx), my + 0.62 * (q - my)) for p, q in points], inner, line=0)

    def muzzle(self, x: float, y: float, r: float, w: float, bridge: float) -> None:
        """Paint nose and mouth: `x` is the nose's place, `bridge` where the muzzle starts between the eyes."""
        b = self.breed
        half, nose = w * (0.62 - 0.2 * b.muzzle), y + (0.2 + 0.42 * b.muzzle) * r
        mouth, jowl = nose + 0.36 * r, 1.18 if "jowls" in b.extras else 1.0
        if self.pick((False, True)):
            self.ovals("open-mouth", x, mouth, r)
        lips = [(bridge, y - 0.05 * r), (bridge + 0.2 * w, y + 0.05 * r), (x + 0.95 * half, nose - 0.02 * r)]
        lips += [(x + jowl * half, mouth - 0.1 * r), (x + 0.6 * half, mouth + 0.1 * r * jowl), (x, mouth)]
        mirror = [(2 * (bridge if i == 1 else x) - u, v) for i, (u, v) in enumerate(lips)]
        self.part("muzzle", lips + mirror[-2:0:-1], 0.5 if "beard" in b.extras else 0, 1.08)
        self.hair("beard", x, mouth, half, r)
        self.thread([(x, nose), (x, mouth - 0.06 * r)])
        for side in SIDES:
            self.thread(at("smile", x, mouth, side * r, r))
        self.blob(at("nose", x, nose, 0.2 * r, 0.2 * r), self.colours["nose"])
        self.ovals("nose-shine", x, nose, 0.2 * r)
