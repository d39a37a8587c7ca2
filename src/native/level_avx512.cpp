// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c. Everything but the products is avx2's.
#define LEVEL avx512
#define WIDTH 16
#include "products.h"

namespace specinfer {
const Kernels& avx512_kernels() {
  static const Kernels kernels = [] {
    Kernels k = avx2_kernels();
    k.name = "avx512";
    k.panel = avx512::PANEL;
    k.gemm = avx512::gemm;
    k.quantize = avx512::quantize;
    return k;
  }();
  return kernels;
}
}  // namespace specinfer
