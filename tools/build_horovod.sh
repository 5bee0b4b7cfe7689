#!/usr/bin/env bash
# Build Horovod 0.28.1, its last release, from its source package, and install it beside the PyTorch of the given venv.
# For the CPU with gloo; with WORKSHOP_HOROVOD=nccl also for GPUs. That needs CUDA's compiler, nvcc, of the major version
# that PyTorch was built for. NCCL comes with PyTorch's wheels; HOROVOD_NCCL_HOME names another. With NCCL, nvcc 13.0 has
# built it for PyTorch 2.15, which is for CUDA 13.2; its ranks talked over gloo, on CPUs. It has not run on a GPU.
set -euo pipefail
venv=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
failed() { echo "Horovod was not built: $1" >&2; exit 1; }
[[ $OSTYPE = linux* ]] || failed "it needs Linux. Notebook 09 shows its stored outputs without it."
command -v g++ >/dev/null || failed "there is no C++ compiler. On Debian: apt install g++ make python3-dev"
for_gpus=${WORKSHOP_HOROVOD:-cpu}
[[ $for_gpus =~ ^(cpu|nccl)$ ]] || failed "WORKSHOP_HOROVOD is '$for_gpus': write cpu or nccl."
if [ "$for_gpus" = nccl ]; then
  command -v nvcc >/dev/null || failed "WORKSHOP_HOROVOD=nccl needs CUDA's compiler, and there is no nvcc on PATH."
  theirs=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "no GPU")')
  ours=$(nvcc --version | grep -oE 'release [0-9.]+' | cut -d' ' -f2) || true
  [ "${theirs%%.*}" = "${ours%%.*}" ] || failed "PyTorch was built for CUDA $theirs, and nvcc is of CUDA $ours: \
install a CUDA toolkit of the same major version, and put its bin first on PATH."
fi
headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] || failed "Python's headers are not in $headers. On Debian: apt install python3-dev"

cd "$work"
export VIRTUAL_ENV=$venv
unset MAKEFLAGS MFLAGS  # make hands them down, and with them Horovod's set-up compiles on one core
# What builds it must be older than today's, and so stays out of the venv.
"$venv/bin/uv" pip install --quiet --target tools 'cmake==3.31.6' 'setuptools==69.5.1' 'wheel==0.45.1'
export PYTHONPATH=$work/tools
echo 'horovod==0.28.1 --hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0' >source.txt
"$venv/bin/pip" download --no-deps --no-build-isolation --no-binary :all: --require-hashes -r source.txt >"$log" 2>&1 ||
  failed "its source package could not be had: $(tail -n 1 "$log")"
tar xf horovod-0.28.1.tar.gz
# PyTorch's headers need C++20; Horovod asks for less, in two places.
sed -i 's/RelWithDebInfo/Release/' horovod-0.28.1/setup.py  # what a debugger reads takes a quarter of the compiler's time
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' horovod-0.28.1/{,horovod/torch/}CMakeLists.txt
# Its process sets, the first of all ranks among them, forget HOROVOD_GLOO_IFACE and take the address that the host's name
# means: loopback on Debian, and where it means nothing, a crash.
sed -i '/::InitializeForProcessSet/,$ s/device_attr.iface = gloo_iface_/device_attr.iface = global_context.gloo_iface_/' \
  horovod-0.28.1/horovod/common/gloo/gloo_context.cc

build() {
  env HOROVOD_CMAKE="$work/tools/bin/cmake" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO "$@" \
    "$venv/bin/pip" wheel --no-build-isolation --no-deps --wheel-dir wheels ./horovod-0.28.1 >"$log" 2>&1
}
why() { grep -m 1 -E 'Could NOT find|: (fatal )?error:|CMake Error' "$log" || tail -n 1 "$log"; }

if [ "$for_gpus" = nccl ]; then
  # CUDA 13's headers need C++17.
  sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' horovod-0.28.1/horovod/common/ops/cuda/CMakeLists.txt
  if [ -z "${HOROVOD_NCCL_HOME:-}" ]; then  # PyTorch's, under the name that a linker looks for
    found=$("$venv/bin/python" -c 'import importlib.util as u; s = u.find_spec("nvidia.nccl"); print(*s.submodule_search_locations if s else "")')
    [ -f "$found/include/nccl.h" ] || failed "PyTorch brings no NCCL here: name its folder in HOROVOD_NCCL_HOME."
    mkdir -p nccl/lib
    ln -s "$found/include" nccl/include
    ln -s "$found/lib/libnccl.so.2" nccl/lib/libnccl.so
    export HOROVOD_NCCL_HOME=$work/nccl
  fi
  # For this machine's GPUs; where it has none, for all that nvcc knows.
  gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | paste -sd,) || true
  build HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED ${gpus:+HOROVOD_BUILD_CUDA_CC_LIST=$gpus} ||
    failed "with NCCL: $(why)"
else
  # It would take any CUDA toolkit on this machine for a wish to use it.
  sed -i 's/from torch.utils.cpp_extension import CUDA_HOME/CUDA_HOME = None/' horovod-0.28.1/cmake/Modules/FindPytorch.cmake
  # Twenty files are compiled as one, so that PyTorch's headers are read twice, not forty times.
  sed -i 's/^set_output_dir()/set(CMAKE_UNITY_BUILD ON)\nset(CMAKE_UNITY_BUILD_BATCH_SIZE 20)\n&/' horovod-0.28.1/horovod/torch/CMakeLists.txt
  build CUDACXX=none || failed "$(why)"
fi
"$venv/bin/uv" pip install --quiet --no-deps --reinstall-package horovod wheels/horovod-*.whl
env -u PYTHONPATH "$venv/bin/python" -c \
  'import horovod.torch as hvd; assert hvd.gloo_built(); print("Horovod 0.28.1 with gloo" + " and NCCL" * bool(hvd.nccl_built()))'
