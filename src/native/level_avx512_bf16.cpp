// Compiled as level_avx512.cpp and with -mavx512bf16 -mavx512vnni. Rows are rounded to bf16 where they meet bf16 weights.
#define LEVEL avx512_bf16
#define WIDTH 16
#include "products.h"

namespace specinfer {
namespace avx512_bf16 {

static void to_row(const float* x, int inputs, Type type, void* to) {
  if (type != Type::bf16_pairs) return avx2_kernels().quantize(x, inputs, type, to);
  uint16_t* out = static_cast<uint16_t*>(to);
  for (int i = 0; i < inputs; ++i) out[i] = to_bf16(x[i]);
  if (inputs % 2) out[inputs] = 0;
}

}  // namespace avx512_bf16

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = [] {
    Kernels k = avx2_kernels();
    k.name = "avx512_bf16";
    k.panel = avx512_bf16::PANEL;
    k.gemm = avx512_bf16::gemm;
    k.quantize = avx512_bf16::to_row;
    k.bf16 = Type::bf16_pairs;
    return k;
  }();
  return kernels;
}
}  // namespace specinfer
