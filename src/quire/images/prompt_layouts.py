"""The families' ways to write an image into a prompt, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.images.layout import ImageLayout, Layout, mismatch
from quire.images.one_tile import MOST_RATIO, Budget, ImageTiles, LongestEdge, Patches, Pixels, Whole
from quire.images.processor_config import Settings, Size
from quire.images.processors import make_processor
from quire.images.tile_layouts import BracketedTiles, MarkedTiles, NamedTiles, SeparatedTiles
from quire.images.tiles import AnyResolution, PanAndScan


class _Selected:
    """Features of a square tile that reach the prompt: those of its patches, and of the first token where it stays."""

    def __init__(self, settings: Settings) -> None:
        text, vision = settings.text, settings.vision
        self.patch = text.number("patch_size", vision.number("patch_size", 14, 1), 1)
        # A CLIP tower has a token before its patches, which the usual choice of features then leaves out again.
        clip = vision.word("model_type", "clip_vision_model").startswith("clip")
        more = text.number("num_additional_image_tokens", int(clip))
        name = "vision_feature_select_strategy"
        self.left_out = text.word(name, settings.config.word(name, "default")) == "default"
        self.more = more - self.left_out

    def rows(self, size: Pixels) -> int:
        """Rows of a tile of `size`."""
        return (size[0] // self.patch) * (size[1] // self.patch) + self.more


class PatchRun(Layout):
    """A row for each patch of the one tile (Liu et al. 2023, LLaVA)."""

    def __init__(self, settings: Settings) -> None:
        token = settings.token("image_token", settings.text.word("image_token", "<image>"))
        super().__init__(token, token, make_processor(settings.image, "CLIPImageProcessor"))
        if not isinstance(self.processor, Whole) or isinstance(self.processor, AnyResolution):
            raise mismatch(settings, "are one tile")
        self.selected = _Selected(settings)
        size = self.processor.size or Size()
        tile = self.processor.crop or (size.height, size.width)
        if not all(tile):
            raise settings.image.wrong("size", "must give height and width, as the tower takes one size, or crop_size")
        self.most_rows = self.selected.rows(tile)

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """The token for each row."""
        return self.token * self.selected.rows(cut.size)


class Unpadded(Layout):
    """The whole image's rows, then those of its tiles without what was padded, each line of them with a row behind
    it (Liu et al. 2024, LLaVA-NeXT)."""

    default = "LlavaNextImageProcessor"

    def __init__(self, settings: Settings) -> None:
        token = settings.token("image_token", settings.text.word("image_token", "<image>"))
        super().__init__(token, token, make_processor(settings.image, self.default))
        if not isinstance(self.processor, AnyResolution):
            raise mismatch(settings, "come in tiles of any resolution")
        self.cutter = self.processor
        self.selected = _Selected(settings)
        side = self.cutter.side
        tile = side, side
        most = max(self.most_tiles_rows(self.full(tile, best)) for best in self.cutter.pinpoints)
        self.most_rows = self.base(tile) + most

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """The token for each row."""
        return self.token * (self.base(cut.size) + self.tiles_rows(size, self.full(cut.size, self.cutter.best(size))))

    def base(self, tile: Pixels) -> int:
        """Rows of the whole image."""
        return self.selected.rows(tile)

    def per_tile(self, tile: Pixels) -> Pixels:
        """Rows and columns of a tile's patches."""
        return tile[0] // self.selected.patch, tile[1] // self.selected.patch

    def full(self, tile: Pixels, best: Pixels) -> Pixels:
        """Rows and columns of all tiles' patches, padding included."""
        high, wide = self.per_tile(tile)
        return high * (best[0] // tile[0]), wide * (best[1] // tile[1])

    def tiles_rows(self, size: Pixels, full: Pixels) -> int:
        """Rows of the patches of tiles that hold the image, and one behind each line."""
        high, wide = unpadded(size, full)
        return high * wide + high

    def most_tiles_rows(self, full: Pixels) -> int:
        """Most rows of tiles without padding."""
        return full[0] * full[1] + full[0]


def unpadded(size: Pixels, full: Pixels) -> Pixels:
    """Indices, of `full` rows and columns, which hold an image of `size` padded on two sides, those without the
    padding."""
    high, wide = full
    if size[1] / size[0] > wide / high:
        inner = int(round(size[0] * (wide / size[1]), 7))
        return high - (high - inner) // 2 * 2, wide
    inner = int(round(size[1] * (high / size[0]), 7))
    return high, wide - (wide - inner) // 2 * 2


SLACK = 1.1
"""Times a side may be longer than the bound before rows are scaled down."""


class Shrunk(Unpadded):
    """Layout of LLaVA-OneVision: the whole image and tiles, with tiles' rows scaled down to a bound; an image among
    others is one tile with a row behind it (Li et al. 2024, LLaVA-OneVision)."""

    default = "LlavaOnevisionImageProcessor"

    def __init__(self, settings: Settings) -> None:
        vision, name = settings.vision, "vision_feature_select_strategy"
        side = vision.number("image_size", 384, 1) // vision.number("patch_size", 14, 1)
        self.count = settings.text.number("num_image_tokens", side * side, 1, 1 << 16)
        self.left_out = settings.text.word(name, settings.config.word(name, "full")) == "default"
        aspect = settings.text.word("vision_aspect_ratio", settings.config.word("vision_aspect_ratio", "anyres_max_9"))
        number = aspect.removeprefix("anyres_max_")
        if not number.isdecimal() or not int(number):
            raise settings.text.wrong("vision_aspect_ratio", f"is {aspect!r}, not anyres_max_ and a number of tiles")
        self.most_tiles = int(number)
        super().__init__(settings)

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """The token for each row."""
        if cut.split == (0, 0):
            return self.token * (self.base(cut.size) + 1)
        return super().text(cut, size)

    def base(self, tile: Pixels) -> int:
        """Rows of the whole image."""
        return self.count - self.left_out

    def per_tile(self, tile: Pixels) -> Pixels:
        """Rows and columns of a tile's patches."""
        side = math.isqrt(self.count)
        return side, side

    def tiles_rows(self, size: Pixels, full: Pixels) -> int:
        """Number of rows that fit the bound, and one behind each line."""
        high, wide = unpadded(size, full)
        ratio = math.sqrt(high * wide / (self.most_tiles * math.isqrt(self.count) ** 2))
        if ratio > SLACK:
            high, wide = int(high // ratio), int(wide // ratio)
        return high * wide + high

    def most_tiles_rows(self, full: Pixels) -> int:
        """Most rows of tiles without padding, or of the most that are not scaled down."""
        bound = int(SLACK**2 * self.most_tiles * math.isqrt(self.count) ** 2) + 1
        return min(full[0] * full[1], bound) + full[0]


class MergedPatches(Layout):
    """A row for each square of merged patches; positions follow rows and columns (Wang et al. 2024, Qwen2-VL)."""

    def __init__(self, settings: Settings) -> None:
        token = settings.token("image_token", "<|image_pad|>")
        super().__init__(token, token, make_processor(settings.image, "Qwen2VLImageProcessor"))
        if not isinstance(self.processor, Patches):
            raise mismatch(settings, "come in patches")
        self.patches = self.processor
        most, least = (bound / self.patches.factor**2 for bound in (self.patches.most, self.patches.least))
        # The thinnest image, shrunk to the most, keeps a side of one patch; grown to the least, rounds both sides up.
        thin = math.sqrt(MOST_RATIO * most)
        grown = least + (math.sqrt(MOST_RATIO) + 1) * math.sqrt(least) + 1
        self.most_rows = math.ceil(max(most, thin, grown))

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """The token for each row."""
        rows, columns = self.grid(cut)
        return self.token * (rows * columns)

    def grid(self, cut: ImageTiles) -> Pixels:
        """Rows and columns of merged patches."""
        return cut.size[0] // self.patches.factor, cut.size[1] // self.patches.factor


class Scanned(Layout):
    """A fixed number of rows between two tokens; crops follow in words (Gemma team 2025, Gemma 3)."""

    def __init__(self, settings: Settings) -> None:
        begin, end = settings.token("boi_token", "<start_of_image>"), settings.token("eoi_token", "<end_of_image>")
        token = settings.token("image_token", "<image_soft_token>")
        super().__init__(begin, token, make_processor(settings.image, "Gemma3ImageProcessor"))
        if not isinstance(self.processor, PanAndScan):
            raise mismatch(settings, "are panned and scanned")
        count = settings.text.number(
            "image_seq_length", settings.config.number("mm_tokens_per_image", 256, 1, 1 << 16), 1, 1 << 16
        )
        self.whole = f"\n\n{begin}{token * count}{end}\n\n"
        self.most_rows = count * (1 + self.processor.most * self.processor.scans)

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """The image, and its crops announced."""
        crops = len(cut.tiles) - 1
        if not crops:
            return self.whole
        more = " ".join([self.whole] * crops)
        return f"Here is the original image {self.whole} and here are some crops to help you see better {more}"

    def parts(self, cut: ImageTiles, rows: int) -> list[tuple[ImageTiles, int]]:
        """Each tile, whose rows see only each other."""
        each = rows // len(cut.tiles)
        return [(ImageTiles(cut.tiles[i : i + 1]), each) for i in range(len(cut.tiles))]


class Budgeted(Layout):
    """A row for each square of patches, as many as an image may have, between two tokens (Team Gemma 2026, Gemma
    4)."""

    def __init__(self, settings: Settings) -> None:
        token = settings.token("image_token", "<|image|>")
        super().__init__(token, token, make_processor(settings.image, "Gemma4ImageProcessor"))
        if not isinstance(self.processor, Budget):
            raise mismatch(settings, "have a number of rows that they may take")
        self.begin, self.end = settings.token("boi_token", "<|image>"), settings.token("eoi_token", "<image|>")
        self.rows, self.most_rows = self.processor.rows, self.processor.most

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """The token for each row."""
        return f"{self.begin}{self.token * self.rows(cut.size)}{self.end}"


class PatchLines(Layout):
    """A row for each patch, a token behind each line of them, another behind the last (Agrawal et al. 2024,
    Pixtral)."""

    def __init__(self, settings: Settings) -> None:
        text, config = settings.text, settings.config
        token = text.word("image_token", "[IMG]")
        patch = text.number("patch_size", settings.vision.number("patch_size", 16, 1), 1)
        self.patch = patch * text.number("spatial_merge_size", config.number("spatial_merge_size", 1, 1), 1)
        super().__init__(
            token, token, make_processor(settings.with_image(patch_size=self.patch), "PixtralImageProcessor")
        )
        if not isinstance(self.processor, LongestEdge):
            raise mismatch(settings, "keep their longest edge")
        self.between, self.end = (
            text.word("image_break_token", "[IMG_BREAK]"),
            text.word("image_end_token", "[IMG_END]"),
        )
        high, wide = (-(-side // self.patch) for side in self.processor.most)
        self.most_rows = high * wide

    def text(self, cut: ImageTiles, size: Pixels) -> str:
        """Lines of patches."""
        rows, columns = cut.size[0] // self.patch, cut.size[1] // self.patch
        return self.between.join([self.token * columns] * rows) + self.end


LAYOUTS: dict[str, Callable[[Settings], ImageLayout]] = {
    "LlavaProcessor": PatchRun,
    "LlavaNextProcessor": Unpadded,
    "LlavaOnevisionProcessor": Shrunk,
    "Qwen2VLProcessor": MergedPatches,
    "Qwen2_5_VLProcessor": MergedPatches,
    "Qwen3VLProcessor": MergedPatches,
    "Gemma3Processor": Scanned,
    "Gemma4Processor": Budgeted,
    "Gemma4UnifiedProcessor": Budgeted,
    "PixtralProcessor": PatchLines,
    "Idefics3Processor": NamedTiles,
    "SmolVLMProcessor": NamedTiles,
    "InternVLProcessor": BracketedTiles,
    "Lfm2VlProcessor": MarkedTiles,
    "Llama4Processor": SeparatedTiles,
}
"""`processor_class` of a file -> how it writes images."""
FAMILIES = {
    "llava": "LlavaProcessor", "llava_next": "LlavaNextProcessor", "llava_onevision": "LlavaOnevisionProcessor",
    "qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor", "qwen3_5": "Qwen3VLProcessor", "qwen3_5_moe": "Qwen3VLProcessor",
    "gemma3": "Gemma3Processor", "gemma4": "Gemma4Processor", "gemma4_unified": "Gemma4UnifiedProcessor",
    "mistral3": "PixtralProcessor",
    "idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor", "internvl": "InternVLProcessor",
    "lfm2_vl": "Lfm2VlProcessor", "llama4": "Llama4Processor",
}  # fmt: skip
"""`model_type` of a model that takes images -> its `processor_class` where no file names one."""


def make_layout(settings: Settings) -> ImageLayout | None:
    """How the model's family writes images; None if it takes none. `ModelError` names a field that does not fit."""
    model_type = settings.config.word("model_type", "")
    if model_type not in FAMILIES:
        return None
    name = settings.processor_class
    if name not in LAYOUTS:
        pixtral = settings.vision.word("model_type", "") == "pixtral"
        name = "PixtralProcessor" if pixtral else FAMILIES[model_type]
    return LAYOUTS[name](settings)
