"""Images that are written tile by tile, with tokens that say which tile it is."""

from __future__ import annotations

from quire.images.canvases import FittedCanvas
from quire.images.layout import Layout, mismatch
from quire.images.one_tile import ImageTiles, Pixels
from quire.images.processor_config import Settings
from quire.images.processors import make_processor
from quire.images.tiles import Canvas, GridAndWhole, Split


class NamedTiles(Layout):
    """Layout with the same number of rows for each tile, behind a token that says which it is (Laurençon et al. 2024,
    Idefics3)."""

    def __init__(self, settings: Settings) -> None:
        token = settings.token("image_token", "<image>")
        super().__init__(token, token, make_processor(settings.image, "Idefics3ImageProcessor"))
        if not isinstance(self.processor, Split):
            raise mismatch(settings, "are split")
        self.around = settings.token("fake_image_token", "<fake_token_around_image>")
        self.whole = settings.token("global_image_token", "<global-img>")
        vision = settings.vision
        side = vision.number("image_size", 364, 1) // vision.number("patch_size", 14, 1)
        derived = int(side * side / settings.config.number("scale_factor", 2, 1) ** 2)
        self.count = settings.text.number("image_seq_len", derived or 1, 1, 1 << 16)
        tiles = self.processor.most if self.processor.splits else 1
        self.most_rows = self.count * (tiles * tiles + 1 if tiles > 1 else 1)

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """Tiles line by line, the whole image behind them."""
        rows, columns = cut.split
        run = self.token * self.count
        lines = [
            "".join(f"{self.around}<row_{row + 1}_col_{column + 1}>{run}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        above = "".join(lines) + "\n" if lines else ""
        return f"{above}{self.around}{self.whole}{run}{self.around}"


class BracketedTiles(Layout):
    """Layout with the same number of rows for each tile, all between two tokens (Chen et al. 2024, InternVL 1.5)."""

    def __init__(self, settings: Settings) -> None:
        token = settings.token("context_image_token", "<IMG_CONTEXT>")
        # Files say false; the class that writes prompts says true.
        super().__init__(
            token, token, make_processor(settings.with_image(crop_to_patches=True), "GotOcr2ImageProcessor")
        )
        if not isinstance(self.processor, Canvas):
            raise mismatch(settings, "are stretched over tiles")
        self.begin, self.end = settings.token("start_image_token", "<img>"), settings.token("end_image_token", "</img>")
        config = settings.config
        self.count = settings.text.number(
            "image_seq_length", config.number("image_seq_length", 256, 1, 1 << 16), 1, 1 << 16
        )
        self.most_rows = self.count * (self.processor.most + 1 if self.processor.cuts else 1)

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """All tiles' rows."""
        return f"{self.begin}{self.token * (self.count * len(cut.tiles))}{self.end}"


class MarkedTiles(Layout):
    """A row for each square of merged patches; tiles behind tokens that say which they are, and the whole image
    (Liquid AI 2025, LFM2-VL)."""

    def __init__(self, settings: Settings) -> None:
        token = settings.token("image_token", "<image>")
        super().__init__(token, token, make_processor(settings.image, "Lfm2VlImageProcessor"))
        if not isinstance(self.processor, GridAndWhole):
            raise mismatch(settings, "come in tiles and whole")
        self.tiles = self.processor
        self.marks = settings.text.flag("use_image_special_tokens", True)
        self.begin = settings.token("image_start_token", "<|image_start|>") if self.marks else ""
        self.end = settings.token("image_end_token", "<|image_end|>") if self.marks else ""
        self.whole = settings.token("image_thumbnail_token", "<|img_thumbnail|>") if self.marks else ""
        most = self.tiles.most * self.rows((self.tiles.side, self.tiles.side)) if self.tiles.cuts else 0
        self.most_rows = most + self.tiles.most_pixels // self.tiles.factor**2

    def rows(self, size: Pixels) -> int:
        """Rows of a tile of `size`."""
        return size[0] // self.tiles.factor * (size[1] // self.tiles.factor)

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """Tiles line by line, the whole image behind them."""
        run = self.token * self.rows(cut.size)
        if cut.split == (0, 0):
            return f"{self.begin}{run}{self.end}"
        named = (f"<|img_row_{i + 1}_col_{j + 1}|>" for i in range(cut.split[0]) for j in range(cut.split[1]))
        tiles = "".join((name if self.marks else "") + run for name in named)
        whole = "" if cut.whole is None else self.whole + self.token * self.rows(cut.whole.shape[1:3])
        return f"{self.begin}{tiles}{whole}{self.end}"

    def parts(self, cut: ImageTiles, rows: int) -> list[tuple[ImageTiles, int]]:
        """The tiles, and the whole image, which is of another size."""
        if cut.whole is None:
            return [(cut, rows)]
        count = self.rows(cut.whole.shape[1:3])
        return [(ImageTiles(cut.tiles, cut.split), rows - count), (ImageTiles(cut.whole), count)]


class SeparatedTiles(Layout):
    """Layout with the same number of rows for each tile, a token between neighbours, another behind each line, and the
    whole image behind a third (Llama 4, Meta AI 2025)."""

    def __init__(self, settings: Settings) -> None:
        text, vision = settings.text, settings.vision
        super().__init__(
            text.word("fake_image_token", "<|image|>"),
            text.word("patch_token", "<|patch|>"),
            make_processor(settings.image, "Llama4ImageProcessor"),
        )
        if not isinstance(self.processor, FittedCanvas):
            raise mismatch(settings, "lie on a canvas of tiles")
        patch = text.number("patch_size", vision.number("patch_size", 14, 1), 1)
        ratio = text.real("pixel_shuffle_ratio", vision.real("pixel_shuffle_ratio", 0.5))
        if not 0 < ratio <= 1:
            raise text.wrong("pixel_shuffle_ratio", f"is {ratio}, needs a number above 0, at most 1")
        self.count = (self.processor.side // patch) ** 2 // round(1 / ratio**2)
        self.most_rows = self.count * (self.processor.most + (self.processor.most > 1))

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """Tiles line by line, the whole image behind them."""
        rows, columns = cut.split
        run = self.token * self.count
        line = "<|tile_x_separator|>".join([run] * columns) + "<|tile_y_separator|>"
        return f"<|image_start|>{line * rows}{self.mark}{run}<|image_end|>"
