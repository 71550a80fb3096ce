#!/usr/bin/env bash
# Make the embedded model smaller by a recipe, and use what came of it.
set -euo pipefail
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

cat > "$out/recipe.toml" <<'RECIPE'
[[stage]]
kind = "quantize"
method = "rtn"
bits = 4
group_size = 32
RECIPE

# Without --no-passport it also measures what was lost: perplexity, KL, exact answers (half a minute).
quire compress pydoc "$out/smaller" --recipe "$out/recipe.toml" --no-passport
echo "What is math.gcd?" | quire chat "$out/smaller"
