#!/bin/bash
# From nothing to an aarch64 TVM runtime that runs on x86-64, inside one folder and without root.
#
#   tools/setup_arm.sh FOLDER
#
# FOLDER/armpy  runs aarch64 Python with TVM's runtime under qemu-user; ARM_CPU names the CPU that is
#               emulated (cortex-a53, cortex-a72, cortex-a76, neoverse-n1; "max" when not set)
# FOLDER/armld  links aarch64 objects to shared libraries, for `export_library(fcompile=...)`
#
# Nothing is installed and no binfmt handler is registered: packages of Debian 12 are downloaded and
# unpacked, wheels too. The TVM in it is of the version that PYTHON has (default: .venv of this clone,
# else python3), or without one of a version that pyproject.toml allows.
#
# Needs apt-get, dpkg-deb, Debian's archive keyring, pip, 700 MB of disk, and a way to a Debian mirror
# (DEBIAN_MIRROR; default: the one this machine uses) and to a package index for pip.
set -euo pipefail

if [ $# -ne 1 ]; then
  sed -n '2,17s/^# \{0,1\}//p' "$0"
  exit 2
fi
folder=$(realpath -m "$1")
clone=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
python=${PYTHON:-$([ -x "$clone/.venv/bin/python" ] && echo "$clone/.venv/bin/python" || echo python3)}
keyring=${DEBIAN_KEYRING:-/usr/share/keyrings/debian-archive-keyring.gpg}
release=bookworm # Python 3.11

fail() {
  echo "setup_arm.sh: $*" >&2
  exit 1
}

[ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m); the emulator is for x86_64"
for tool in apt-get dpkg-deb; do
  command -v "$tool" > /dev/null || fail "$tool is missing; run this on Debian or Ubuntu"
done
[ -r "$keyring" ] || fail "$keyring is missing; install debian-archive-keyring, or set DEBIAN_KEYRING"
pip=("$python" -m pip)
"${pip[@]}" --version > /dev/null 2>&1 || pip=(python3 -m pip)
"${pip[@]}" --version > /dev/null 2>&1 || fail "neither $python nor python3 has pip"
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 2> /dev/null |
  awk -v release="$release" '$2 == release { print $1; exit }')}
mirror=${mirror:-http://deb.debian.org/debian}
mapfile -t requirements < <("$python" - "$clone/pyproject.toml" << 'PY'
import re, sys
from importlib.metadata import PackageNotFoundError, version

allowed = open(sys.argv[1], encoding="utf-8").read()
for name in ("apache-tvm", "apache-tvm-ffi", "numpy"):
    try:
        print(f"{name}=={version(name)}")
    except PackageNotFoundError:
        print(re.search(rf'"({name}[<>=][^"]*)"', allowed)[1])
PY
)
[ ${#requirements[@]} = 3 ] || fail "$python does not run; set PYTHON to a Python 3"

downloads=$folder/downloads
rm -rf "$folder"/{root,host,site,downloads,armpy,armld,ready}
mkdir -p "$folder"/{root,host,site} "$downloads/wheels"

# An apt-get for one architecture with a state of its own. It believes that no package is installed,
# so that it downloads all dependencies.
apt() {
  local arch=$1 state=$downloads/$1
  shift
  mkdir -p "$state"/{lists,archives}/partial
  : > "$state/status"
  echo "deb [arch=$arch signed-by=$keyring] $mirror $release main" > "$state/sources.list"
  apt-get -qq \
    -o APT::Architecture="$arch" -o APT::Architectures="$arch" -o APT::Sandbox::User= \
    -o APT::Install-Recommends=false -o Acquire::Languages=none -o Acquire::Retries=3 \
    -o Debug::NoLocking=true -o Dpkg::Use-Pty=0 \
    -o Dir::Etc::SourceList="$state/sources.list" -o Dir::Etc::SourceParts=- \
    -o Dir::State::Lists="$state/lists" -o Dir::State::Status="$state/status" \
    -o Dir::Cache::Archives="$state/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
    "$@" > "$state/log" 2>&1 || {
    cat "$state/log" >&2
    fail "apt-get $* failed for $arch from $mirror"
  }
}

get_userland() { # Python and the C and C++ libraries, for aarch64
  apt arm64 update
  apt arm64 -y --download-only install \
    python3.11-minimal libpython3.11-stdlib libstdc++6 libgcc-s1 zlib1g
  for package in "$downloads"/arm64/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
}

get_tools() { # a static emulator and a linker, for this machine
  apt amd64 update
  (cd "$downloads/amd64/archives" && apt amd64 download qemu-user-static binutils-aarch64-linux-gnu)
  for package in "$downloads"/amd64/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$folder/host" --wildcards \
      './usr/bin/qemu-aarch64-static' './usr/bin/aarch64-linux-gnu-ld*' './usr/lib/*' \
      2> /dev/null || [ "${PIPESTATUS[0]}" = 0 ] # a package has only some of them
  done
}

get_wheels() { # TVM and what it imports, for aarch64 Python 3.11; unpacked, never run on this machine
  local platforms=(--platform manylinux2014_aarch64) glibc
  for glibc in 17 24 27 28 34; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  "${pip[@]}" download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
    "${platforms[@]}" --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
    -d "$downloads/wheels" "${requirements[@]}" ml_dtypes typing_extensions cloudpickle
  for wheel in "$downloads"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$folder/site"; done
  # The runtime is enough, and imports in 2 s instead of 13 s.
  rm -f "$folder"/site/tvm/lib/libtvm_compiler.so "$folder"/site/tvm/lib/libtvm_runtime_cuda.so
}

jobs=()
for job in get_userland get_tools get_wheels; do
  "$job" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || fail "a download failed; see above"; done
rm -rf "$downloads"

cat > "$folder/armpy" << 'W'
#!/bin/sh
here=$(dirname "$(realpath "$0")")
exec "$here/host/usr/bin/qemu-aarch64-static" -cpu "${ARM_CPU:-max}" -L "$here/root" \
  -E PYTHONPATH="$here/site" -E PYTHONDONTWRITEBYTECODE=1 -E TVM_USE_RUNTIME_LIB=1 \
  -E TVM_NUM_THREADS="${TVM_NUM_THREADS:-2}" "$here/root/usr/bin/python3.11" "$@"
W
cat > "$folder/armld" << 'W'
#!/bin/sh
here=$(dirname "$(realpath "$0")")
LD_LIBRARY_PATH="$here/host/usr/lib/x86_64-linux-gnu" \
  exec "$here/host/usr/bin/aarch64-linux-gnu-ld" "$@"
W
chmod +x "$folder/armpy" "$folder/armld"

"$folder/armld" --version > "$folder/linker-version"
"$folder/armpy" -B -c "
import platform, numpy, tvm, tvm.rpc.server, tvm.runtime.vm
assert platform.machine() == 'aarch64', platform.machine()
print(platform.machine(), 'python', platform.python_version(), 'tvm', tvm.__version__, 'numpy', numpy.__version__)"
touch "$folder/ready"
