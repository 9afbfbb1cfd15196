# Sourced: installs the Debian or Ubuntu packages that are missing, and says which.
install_missing() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    echo "== all packages are installed"
    return
  fi
  command -v apt-get >/dev/null || { echo "this machine has no apt-get; install by hand: ${missing[*]}" >&2; exit 2; }
  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "not root and no sudo; install by hand: ${missing[*]}" >&2; exit 2; }
    root=(sudo)
  fi
  echo "== installing: ${missing[*]}"
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

build_packages=(g++ cmake ninja-build libfmt-dev libcli11-dev nlohmann-json3-dev libpng-dev)
test_packages=(libgtest-dev libbenchmark-dev pkg-config python3)
