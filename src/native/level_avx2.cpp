// Compiled with -mavx2 -mfma -mf16c.
#define LEVEL avx2
#include "level.h"

namespace specinfer {
const Kernels& avx2_kernels() {
  static const Kernels kernels{"avx2", avx2::PANEL, avx2::gemm, avx2::quantize, avx2::attention, avx2::join,
                               avx2::rms_norm, avx2::layer_norm, avx2::head_norm, avx2::rotate, avx2::to_kv};
  return kernels;
}
}  // namespace specinfer
