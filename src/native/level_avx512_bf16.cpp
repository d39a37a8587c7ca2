// Compiled as level_avx512.cpp and with -mavx512bf16 -mavx512vnni. Rows are rounded to bf16 where they meet bf16 weights.
#define LEVEL avx512_bf16
#define WIDTH 16
#include "products.h"

namespace specinfer {
namespace avx512_bf16 {

// to_bf16 of every lane.
INLINE U round_to_bf16(F x) {
  const U bits = (U)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 64 : rounded;
}

INLINE void store_halves(uint16_t* p, U v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
}

static void to_row(const float* x, int inputs, Type type, void* to) {
  if (type != Type::bf16_pairs) return quantize(x, inputs, type, to);
  uint16_t* out = static_cast<uint16_t*>(to);
  int i = 0;
  for (; i + W <= inputs; i += W) store_halves(out + i, round_to_bf16(load(x + i)));
  for (; i < inputs; ++i) out[i] = to_bf16(x[i]);
  if (inputs % 2) out[inputs] = 0;
}

#include "attention_pairs.h"

}  // namespace avx512_bf16

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = [] {
    Kernels k = avx2_kernels();
    k.name = "avx512_bf16";
    k.panel = avx512_bf16::PANEL;
    k.gemm = avx512_bf16::gemm;
    k.quantize = avx512_bf16::to_row;
    k.attention = avx512_bf16::attention;
    k.join = avx512_bf16::join;
    k.bf16 = Type::bf16_pairs;
    k.q8_0 = Type::q8_quads;
    k.q6_k = Type::q6_quads;
    return k;
  }();
  return kernels;
}
}  // namespace specinfer
