"""The known layouts by the names that recipes give them."""

from __future__ import annotations

from quire.compress.layouts.awq import AwqLayout
from quire.compress.layouts.base import Layout
from quire.compress.layouts.bitsandbytes import BitsAndBytesLayout
from quire.compress.layouts.compressed_tensors import CompressedTensorsLayout
from quire.compress.layouts.gptq import GptqLayout

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (CompressedTensorsLayout(), GptqLayout(), GptqLayout("gptq_v2"), AwqLayout(), BitsAndBytesLayout())
}
