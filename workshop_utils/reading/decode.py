"""From the bytes of a file to an upright RGB image, or to the reason why it is no photo."""

from contextlib import suppress
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # a stranger's file should not reach the decoders of other formats
MAX_PIXELS = 50_000_000  # decoded, a photo of this size already takes 150 MB
MAX_ASPECT = 50  # resizing the short side of 1 x 1,000,000 pixels to 256 would take 200 GB
END_OF_JPEG = b"\xff\xd9"


class BadPhoto(ValueError):
    """A file is not a photo that a model can be given; the message names the file and the reason."""


def decode_photo(content: bytes | Exception, path: str) -> Image.Image:
    """Return a file's bytes as an upright RGB `PIL.Image`; raise BadPhoto, which names `path`, for anything else.

    Upright: turned as the file's EXIF says, as `PIL.ImageOps.exif_transpose` does. Damaged EXIF is no error.
    content: bytes, or the exception that reading them raised.
    """
    if isinstance(content, Exception):
        missing = isinstance(content, FileNotFoundError)
        raise BadPhoto(f"{path}: {'there is no such file' if missing else f'cannot be read ({content})'}") from content
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS:,}: make it smaller")
        if max(image.size) > MAX_ASPECT * min(image.size):
            raise ValueError(f"{image.width}x{image.height} pixels, too narrow: crop it")
        if (n_frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a phone's JPEG with a preview
            raise ValueError(f"animated, {n_frames} frames: save one frame")
        if depth := {"I": "16-bit", "F": "float"}.get(image.mode[0]):
            raise ValueError(f"{depth} pixels: save it with 8 bits a channel")
        if image.format in ("JPEG", "MPO") and content.endswith(b"\0") and not _has_end(content):
            raise ValueError("its last part is zeros, as after a download that broke off: fetch it again")
        if image.format == "PNG" and "transparency" in image.info and (bits := content[24]) != 8:
            if bits == 16:
                raise ValueError("16-bit pixels with a transparent colour: save it with 8 bits a channel")
            if image.mode == "L":  # Pillow scales the pixels of 2 and 4 bits, and not the transparent one
                image.info["transparency"] *= 255 // (2**bits - 1)
        pixels = _on_white(image) if image.has_transparency_data else image.convert("RGB")
        with suppress(Exception):  # Pillow raises errors of many types for damaged EXIF, and the pixels may be fine
            ImageOps.exif_transpose(pixels, in_place=True)  # a phone stores photos as its sensor sees them
        return pixels
    except Exception as error:  # Pillow raises errors of nearly any type for a damaged header
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = _what_it_is(content) if content else "the file is empty"
        raise BadPhoto(f"{path}: {reason}") from error


def _has_end(content):
    """Return whether a JPEG's image comes to its end; a thumbnail's end, in a segment before it, does not count."""
    position = 2
    while (marker := content[position + 1 : position + 2]) not in (b"\xda", b""):  # with DA the image's data begin
        filled = marker == b"\xff"  # a segment may begin with several of these
        position += 1 if filled else 2 + int.from_bytes(content[position + 2 : position + 4], "big")
    return END_OF_JPEG in content[position:]


def _on_white(image):
    """Return an image in RGB as a viewer shows it on white paper: what is transparent is white."""
    colours = image.convert("RGBA")
    opacity = colours.getchannel("A")
    if image.format == "BMP" and opacity.getextrema()[1] == 0:  # Windows writes zeros where there is no opacity
        return colours.convert("RGB")
    pixels = Image.new("RGB", colours.size, "white")
    pixels.paste(colours, mask=opacity)
    pixels.info = colours.info  # with the EXIF
    return pixels


def _what_it_is(content):
    """Return why Pillow, asked for FORMATS, cannot read a file: its kind, as far as its first bytes say it."""
    begin = content[:16].ljust(16, b"\0")
    kinds = [name for name, (_, accepts) in Image.OPEN.items() if accepts and accepts(begin)]
    if begin[4:8] == b"ftyp":  # HEIC and its relatives, some of which Pillow does not know
        brand = begin[8:12].decode("ascii", "replace").strip()
        kinds = ["AVIF" if brand[:3] == "avi" else "HEIC" if brand[:2] in ("he", "mi", "ms") else brand.upper()]
    elif content.endswith(b"TRUEVISION-XFILE.\0"):
        kinds = ["TGA"]
    if not kinds:
        return "not an image that Pillow can read"
    if kinds[0] in FORMATS:
        return f"a damaged {kinds[0]}: its first bytes are those of one, and Pillow cannot read on"
    return f"its format is {kinds[0]}, and photos are {', '.join(FORMATS)}: convert it"
