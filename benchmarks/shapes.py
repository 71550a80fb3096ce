"""The shapes of `quire bench suite`, under the name by which benchmarks know them."""

from quire.bench.suite.foreign.shapes import COMMON as COMMON
from quire.bench.suite.foreign.shapes import EXPERTS as EXPERTS
from quire.bench.suite.foreign.shapes import HEAD_NORMS as HEAD_NORMS
from quire.bench.suite.foreign.shapes import MATRICES as MATRICES
from quire.bench.suite.foreign.shapes import NORMS as NORMS
from quire.bench.suite.foreign.shapes import SHAPES as SHAPES
from quire.bench.suite.foreign.shapes import expert_shapes as expert_shapes
from quire.bench.suite.foreign.shapes import shape_of as shape_of
from quire.bench.suite.foreign.shapes import vocabulary as vocabulary
from quire.bench.suite.foreign.shapes import write_checkpoint as write_checkpoint
from quire.bench.suite.foreign.shapes import write_config as write_config
from quire.bench.suite.foreign.shapes import write_tokenizer as write_tokenizer
