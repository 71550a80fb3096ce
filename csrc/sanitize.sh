#!/usr/bin/env bash
# sanitize.sh BUILD PYTHON TEST...: runs tests with the extension of a build folder made with -DQUIRE_SANITIZE=...; the installed
# one stays as it is. Python starts without site (-S), so that its hooks cannot find the installed package first.
set -euo pipefail
build=$1 python=$2
shift 2
site=$build/site
rm -rf "$site" && mkdir -p "$site" && cp -r src/quire "$site/"
cp "$build"/_native.*.so "$site/quire/"
packages=$("$python" -c 'import sys; print(":".join(p for p in sys.path if p.endswith("site-packages")))')

# The sanitizers' libraries come before everything else, and the one that throws beside them: python itself links none of them.
preload=$(ldd "$site"/quire/_native.*.so | awk '/lib(asan|tsan|ubsan|stdc\+\+)\.so/ {print $3}' | tr '\n' ' ')
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONMALLOC=malloc OMP_NUM_THREADS=1 PYTHONPATH=$site:$packages
LD_PRELOAD=$preload "$python" -S -c 'import quire._native as n; print("with sanitizers:", n.__file__, n.units())'
LD_PRELOAD=$preload exec "$python" -S -m pytest -x --timeout 3600 -p no:cacheprovider --capture=sys "$@"
