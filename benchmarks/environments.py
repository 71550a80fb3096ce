"""The environments of `quire bench suite`; `python environments.py FOLDER NAME` makes one, and prints where it is."""

import sys
from pathlib import Path

from quire.bench.suite.environments import LLAMA_CPP_PYTHON as LLAMA_CPP_PYTHON
from quire.bench.suite.environments import RECIPES as RECIPES
from quire.bench.suite.environments import Environment as Environment
from quire.bench.suite.environments import environment as environment

if __name__ == "__main__":
    print(environment(Path(sys.argv[1]), sys.argv[2]).folder)
