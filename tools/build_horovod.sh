#!/usr/bin/env bash
# Build Horovod 0.28.1, its last release, from its source package, and install it beside the PyTorch of the given venv.
# For the CPU with gloo; also for NCCL where there is a GPU and CUDA's compiler.
set -euo pipefail
venv=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
failed() { echo "Horovod was not built: $1" >&2; exit 1; }
command -v g++ >/dev/null || failed "there is no C++ compiler. On Debian: apt install g++ make"
headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] || failed "Python's headers are not in $headers. On Debian: apt install python3-dev"

cd "$work"
export VIRTUAL_ENV=$venv
# What builds it must be older than today's, and so stays out of the venv.
"$venv/bin/uv" pip install --quiet --target tools 'cmake==3.31.6' 'setuptools==69.5.1' 'wheel==0.45.1'
export PYTHONPATH=$work/tools
echo 'horovod==0.28.1 --hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0' >source.txt
"$venv/bin/pip" download --no-deps --no-build-isolation --no-binary :all: --require-hashes -r source.txt >"$log" 2>&1 ||
  failed "its source package could not be had: $(tail -n 1 "$log")"
tar xf horovod-0.28.1.tar.gz
# PyTorch's headers need C++20; Horovod asks for less, in two places.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' horovod-0.28.1/{,horovod/torch/}CMakeLists.txt

build() {
  env HOROVOD_CMAKE="$work/tools/bin/cmake" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO "$@" \
    "$venv/bin/pip" wheel --no-build-isolation --no-deps --wheel-dir wheels ./horovod-0.28.1 >"$log" 2>&1
}
nccl=$("$venv/bin/python" -c 'import importlib.util as u; s = u.find_spec("nvidia.nccl"); print(list(s.submodule_search_locations)[0] if s else "")' 2>/dev/null || true)
if nvidia-smi >/dev/null 2>&1 && command -v nvcc >/dev/null; then
  [ -z "$nccl" ] || ln -sf libnccl.so.2 "$nccl/lib/libnccl.so"
  build HOROVOD_GPU_OPERATIONS=NCCL ${nccl:+HOROVOD_NCCL_HOME=$nccl} HOROVOD_NCCL_LINK=SHARED ||
    echo "With NCCL it could not be built, so it is built for the CPU: $(grep -m 1 -i error "$log")" >&2
fi
if ! compgen -G 'wheels/horovod-*.whl' >/dev/null; then
  rm -rf horovod-0.28.1/build
  # It would take any CUDA toolkit on this machine for a wish to use it.
  sed -i 's/from torch.utils.cpp_extension import CUDA_HOME/CUDA_HOME = None/' horovod-0.28.1/cmake/Modules/FindPytorch.cmake
  build CUDACXX=none || failed "$(grep -m 1 -E 'CMake Error|error:' "$log" || tail -n 1 "$log")"
fi
"$venv/bin/uv" pip install --quiet --no-deps --reinstall-package horovod wheels/horovod-*.whl
env -u PYTHONPATH "$venv/bin/python" -c \
  'import horovod.torch as hvd; assert hvd.gloo_built(); print("Horovod 0.28.1 with gloo" + " and NCCL" * bool(hvd.nccl_built()))'
