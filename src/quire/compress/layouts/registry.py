"""The known layouts by the names that recipes give them."""

from __future__ import annotations

from quire.compress.layouts.awq import Awq
from quire.compress.layouts.base import Layout
from quire.compress.layouts.bitsandbytes import BitsAndBytes
from quire.compress.layouts.compressed import CompressedTensors
from quire.compress.layouts.gptq import Gptq

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (CompressedTensors(), Gptq(), Gptq("gptq_v2"), Awq(), BitsAndBytes())
}
