#!/bin/sh
# Installs a build into a fresh prefix, then builds and runs the examples against what was installed, as a user would.
# usage: installed_test.sh BUILD_DIR SOURCE_DIR CXX
set -eu
build=$1 source=$2 cxx=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" > "$work/install.log" || { cat "$work/install.log"; exit 1; }
mv "$work/first" "$work/prefix"  # an installed tree may be moved

for example in c cpp serving; do
  echo "== $example with find_package"
  cmake -G Ninja -S "$source/examples/$example" -B "$work/$example" -DCMAKE_PREFIX_PATH="$work/prefix" \
    -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON \
    > "$work/$example.log" 2>&1 || { cat "$work/$example.log"; exit 1; }
  cmake --build "$work/$example" > "$work/$example.log" 2>&1 || { cat "$work/$example.log"; exit 1; }
  "$work/$example/example"
done

if [ -x "$build/tools/tessera/tessera" ]; then
  echo "== the command"
  "$work/prefix/bin/tessera" info
  [ "$("$work/prefix/bin/tessera" mask "forward f32 q2 k3 mask=causal" | tr '\n' ' ')" = "110 111 " ]
fi
[ -s "$work/prefix/share/doc/tessera/contract.md" ]

library=$(find "$work/prefix" -name libtessera.so)
pc=$(find "$work/prefix" -name tessera.pc)
[ -n "$pc" ] || { echo "tessera.pc is not installed"; exit 1; }
export LD_LIBRARY_PATH="$(dirname "$library")"

echo "== plain C99"
${CC:-cc} -std=c99 -Wall -Wextra -pedantic -Werror -I"$work/prefix/include" "$source/tests/api/c99.c" "$library" \
  -o "$work/c99"
"$work/c99"

if command -v pkg-config > /dev/null; then
  echo "== c with pkg-config"
  export PKG_CONFIG_PATH="$(dirname "$pc")"
  ${CC:-cc} "$source/examples/c/main.c" -o "$work/example" $(pkg-config --cflags --libs tessera) -lm
  "$work/example" | tail -n 2
fi

# The library shows the C interface and nothing else.
if command -v nm > /dev/null; then
  others=$(nm -D --defined-only "$library" | awk '{print $NF}' | grep -v '^tessera_' | sed 's/@.*//' | sort -u || true)
  [ -z "$others" ] || { echo "symbols that are not of the C interface:"; echo "$others" | head -20; exit 1; }
fi
