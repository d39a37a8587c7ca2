// The linear layers of a level: define LEVEL (its namespace) and, for registers of 16 floats, WIDTH, then include this.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#ifdef __FMA__
#include <immintrin.h>
#endif

#include "kernels.h"
#include "packing.h"

namespace specinfer {
namespace LEVEL {

#include "vec.h"

#include "gemm.h"

#include "quant_gemm.h"

void gemm(const GemmArgs& a, int begin, int end) {
  if (is_quantized(a.linear->type)) return quant_gemm(a, begin, end);
#ifdef __AVX512BF16__
  if (a.linear->type == Type::bf16_pairs) return gemm_of<Type::bf16_pairs>(a, begin, end);
#else
  if (a.linear->type == Type::bf16) return gemm_of<Type::bf16>(a, begin, end);
#endif
  gemm_of<Type::f32>(a, begin, end);
}

}  // namespace LEVEL
}  // namespace specinfer
