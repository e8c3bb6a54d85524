#!/bin/bash
# All steps of README.md on a PC, with an emulator in place of the board:
#
#   examples/pi/try_in_emulator.sh FOLDER
#
# FOLDER/arm is made by tools/setup_arm.sh if it is not there. PYTHON (default: python3) is one that
# has relayquant. The C++ part needs cmake and g++-aarch64-linux-gnu, and is left out without them.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
folder=$(realpath "$1")
here=$(dirname "$(realpath "$0")")
python=${PYTHON:-python3}
export ARM_CPU=cortex-a76

[ -e "$folder/arm/ready" ] || PYTHON=$python "$here/../../tools/setup_arm.sh" "$folder/arm"
# Debian's linker lies in the emulator's folder; it is found by its name.
mkdir -p "$folder/bin"
ln -sf "$folder/arm/armld" "$folder/bin/aarch64-linux-gnu-ld"
PATH="$PATH:$folder/bin" "$python" "$here/make_bundle.py" "$folder/digits-pi" \
  --cpu "$ARM_CPU" --runtime "$folder/arm/site"

# The emulated board has no package apache-tvm: what it runs is in the folder.
rm -rf "$folder/board"
mkdir "$folder/board"
cp -r "$folder/arm/site/"{numpy,numpy.libs,tvm_ffi,typing_extensions.py} "$folder/board/"
emulator=$folder/arm/host/usr/bin/qemu-aarch64-static
"$emulator" -cpu "$ARM_CPU" -L "$folder/arm/root" -E PYTHONPATH="$folder/board" \
  "$folder/arm/root/usr/bin/python3.11" -B "$here/predict.py" "$folder/digits-pi"

if command -v cmake > /dev/null && command -v aarch64-linux-gnu-g++ > /dev/null; then
  cmake -S "$folder/digits-pi/example" -B "$folder/build" -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > /dev/null
  cmake --build "$folder/build" > /dev/null
  "$emulator" -cpu "$ARM_CPU" -L /usr/aarch64-linux-gnu "$folder/build/run" \
    "$folder/digits-pi" "$folder/digits-pi/image.bin" | cut -c 1-100
else
  echo "no cmake or no aarch64-linux-gnu-g++: the C++ program was not tried"
fi
