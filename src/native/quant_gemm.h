// y = x W^T in integers, over quantised panels and rows. A block's products add up exactly; blocks are combined in
// fp32 in order, with one accumulator per (row, column) and no fused operation: the same bits for any number of
// rows and at every level. Included inside a level's namespace.

typedef int16_t S __attribute__((vector_size(4 * W), aligned(2), may_alias));

// 2 * W bytes to 16 bits each.
INLINE S widen_bytes(const char* p) {
#if WIDTH == 16
  return (S)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__FMA__)
  return (S)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef int8_t B __attribute__((vector_size(2 * W), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const B*>(p), S);
#endif
}

INLINE I splat_word(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return I{REPEAT(x)};
}

// Lane i: a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
INLINE I multiply_pairs(S a, S b) {
#if WIDTH == 16
  return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__FMA__)
  return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const I x = (I)a, y = (I)b;
  return ((I)((U)x << 16) >> 16) * ((I)((U)y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

INLINE I add_pairs(I sums, S a, S b) {
#ifdef __AVX512VNNI__
  return (I)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
  return sums + multiply_pairs(a, b);
#endif
}

// Sums of a block of nibbles times bytes, W columns: in 16 bits where that is what the instruction gives, since
// 16 * 15 * 127 fits, and with q4_0's start any sum on the way may wrap as its end fits.
#if defined(__FMA__) && !defined(__AVX512VNNI__)
typedef S NibbleSums;
INLINE NibbleSums start_sums(I minus_eight) { return (S)minus_eight; }
INLINE NibbleSums add_quads(NibbleSums sums, U nibbles, I x) {
#if WIDTH == 16
  return sums + (S)_mm512_maddubs_epi16((__m512i)nibbles, (__m512i)x);
#else
  return sums + (S)_mm256_maddubs_epi16((__m256i)nibbles, (__m256i)x);
#endif
}
INLINE I total(NibbleSums sums) { return multiply_pairs(sums, S{} + 1); }
#else
typedef I NibbleSums;
INLINE NibbleSums start_sums(I minus_eight) { return multiply_pairs((S)minus_eight, S{} + 1); }
INLINE NibbleSums add_quads(NibbleSums sums, U nibbles, I x) {
#ifdef __AVX512VNNI__
  return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)nibbles, (__m512i)x);
#else
  for (int i = 0; i < 32; i += 8) sums = sums + (I)((nibbles >> i) & 15) * ((I)((U)x << (24 - i)) >> 24);
  return sums;
#endif
}
INLINE I total(NibbleSums sums) { return sums; }
#endif

// Finite fp16 to fp32, exactly.
INLINE F widen_half(const char* p) {
#if WIDTH == 16
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef uint16_t H __attribute__((vector_size(2 * W), aligned(2), may_alias));
  const U bits = __builtin_convertvector(*reinterpret_cast<const H*>(p), U);
  const F magnitude = (F)((bits & 0x7fff) << 13) * splat(5.192296858534828e33f);  // 2^112
  return (F)((U)magnitude | (bits & 0x8000) << 16);
#endif
}

// W numbers of one byte each, none above 127.
INLINE F widen_numbers(const char* p) {
#if WIDTH == 16
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__FMA__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t B __attribute__((vector_size(W), aligned(1), may_alias));
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const B*>(p), I), F);
#endif
}

// `inputs` values of one row, as packing.h says.
void quantize(const float* x, int inputs, Type type, void* to) {
  const bool narrow = has_nibbles(type) || has_quads(type);
  const int block = block_inputs(type);
  char* out = static_cast<char*>(to);
  for (int64_t start = 0; start < inputs; start += block, out += row_block_bytes(type)) {
    F top = splat(0.0f);
    for (int64_t i = 0; i < block; i += W) top = max(top, (F)((U)load(x + start + i) & 0x7fffffff));
    const float size = largest(top), inverse = size > 1e-30f ? 127.0f / size : 0.0f;
    RowBlock head{inverse > 0.0f ? size / 127.0f : 0.0f, 0.0f, {0, 0}, 0};
    I sums{};
    for (int64_t i = 0; i < block; i += W) {
      const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
      const I q = (I)(load(x + start + i) * splat(inverse) + splat(magic)) - 0x4b400000;
      sums = sums + q;
      typedef int8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));
      typedef int16_t Words __attribute__((vector_size(2 * W), aligned(1), may_alias));
      if (narrow)
        *reinterpret_cast<Bytes*>(out + sizeof(RowBlock) + i) = __builtin_convertvector(q, Bytes);
      else
        *reinterpret_cast<Words*>(out + sizeof(RowBlock) + 2 * i) = __builtin_convertvector(q, Words);
    }
    int first = 0, second = 0;
    for (int i = 0; i < W; ++i) (i & 2 ? second : first) += sums[i];
    head.sum = head.scale * float(first + second);
    if (narrow) {
      head.minus_eight[0] = int16_t(-8 * first);
      head.minus_eight[1] = int16_t(-8 * second);
    }
    std::memcpy(out, &head, sizeof(RowBlock));
  }
}

// R rows by P neighbouring panels; of nibbles one. Every block also fetches the next `ahead_step` bytes of what comes next.
template <Type T, int R, int P>
void quant_tile(const GemmArgs& a, int panel, int row, const char* ahead, int64_t ahead_step) {
  const int64_t inputs = a.linear->inputs, steps = block_inputs(T) / 4, bytes = panel_bytes(T, inputs, PANEL);
  const char* w = a.linear->data + panel * bytes;
  const char* x = static_cast<const char*>(a.x) + row * a.x_stride;
  F lo[P][R], hi[P][R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) lo[p][r] = hi[p][r] = splat(0.0f);
  constexpr int blocks = unit_inputs(T) / block_inputs(T);
  const char *unit = w, *wanted = ahead;
  for (int64_t b = 0; b < inputs / block_inputs(T); ++b, x += row_block_bytes(T)) {
    if (b % blocks == 0) {
      unit = w;
      w += 2 * unit_numbers(T) * PANEL;
    }
    for (wanted += ahead_step; ahead < wanted; ahead += LINE)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * bytes, 0, 2);
    const char* numbers = w;
    const char* q = x + sizeof(RowBlock);
    I sum_lo[P][R], sum_hi[P][R];
    w += block_numbers(T) * PANEL;
    if constexpr (has_nibbles(T)) {
      static_assert(P == 1);
      NibbleSums s_lo[R], s_hi[R];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        s_lo[r] = s_hi[r] = start_sums(
            T == Type::q4_0 ? splat_word(x + r * a.x_stride + offsetof(RowBlock, minus_eight)) : I{});
#pragma GCC unroll 2
      for (int64_t k = 0; k < steps; ++k, w += 2 * PANEL, q += 4) {
        const U both = *reinterpret_cast<const U*>(w);
        const U low = both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const I v = splat_word(q + r * a.x_stride);
          s_lo[r] = add_quads(s_lo[r], low, v);
          s_hi[r] = add_quads(s_hi[r], high, v);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum_lo[0][r] = total(s_lo[r]);
        sum_hi[0][r] = total(s_hi[r]);
      }
#ifdef __AVX512VNNI__
    } else if constexpr (has_quads(T)) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const I eights = splat_word(x + r * a.x_stride + offsetof(RowBlock, minus_eight));
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sum_lo[p][r] = sum_hi[p][r] = start_sums(eights) << 4;
      }
      for (int64_t k = 0; k < steps; ++k, w += 4 * PANEL, q += 4) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          const U low = *reinterpret_cast<const U*>(w + p * bytes), high = *reinterpret_cast<const U*>(w + p * bytes + 2 * PANEL);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const I v = splat_word(q + r * a.x_stride);
            sum_lo[p][r] = add_quads(sum_lo[p][r], low, v);
            sum_hi[p][r] = add_quads(sum_hi[p][r], high, v);
          }
        }
      }
#endif
    } else {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sum_lo[p][r] = sum_hi[p][r] = I{};
      for (int64_t k = 0; k < steps; ++k) {
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; ++pair, w += 2 * PANEL, q += 4) {
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) {
            const S low = widen_bytes(w + p * bytes);
            const S high = widen_bytes(w + p * bytes + PANEL);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
              const S v = (S)splat_word(q + r * a.x_stride);
              sum_lo[p][r] = add_pairs(sum_lo[p][r], low, v);
              sum_hi[p][r] = add_pairs(sum_hi[p][r], high, v);
            }
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const char *scales = unit + p * bytes, *factors = numbers + p * bytes;
      F scale_lo = widen_half(scales), scale_hi = widen_half(scales + 2 * W);
      if constexpr (block_numbers(T) > 0) {
        scale_lo = scale_lo * widen_numbers(factors);
        scale_hi = scale_hi * widen_numbers(factors + W);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F scale = (F)splat_word(x + r * a.x_stride + offsetof(RowBlock, scale));
        lo[p][r] = lo[p][r] + __builtin_convertvector(sum_lo[p][r], F) * (scale_lo * scale);
        hi[p][r] = hi[p][r] + __builtin_convertvector(sum_hi[p][r], F) * (scale_hi * scale);
      }
      if constexpr (unit_numbers(T) == 2) {
        F minimum_lo = widen_half(scales + 2 * PANEL), minimum_hi = widen_half(scales + 2 * PANEL + 2 * W);
        if constexpr (T == Type::q4_k) {
          minimum_lo = -(minimum_lo * widen_numbers(factors + PANEL));
          minimum_hi = -(minimum_hi * widen_numbers(factors + PANEL + W));
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const F sum = (F)splat_word(x + r * a.x_stride + offsetof(RowBlock, sum));
          lo[p][r] = lo[p][r] + minimum_lo * sum;
          hi[p][r] = hi[p][r] + minimum_hi * sum;
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) store_panel<R>(a, panel + p, row, lo[p], hi[p]);
}

template <Type T>
void quant_gemm_of(const GemmArgs& a, int begin, int end) {
  const int64_t inputs = a.linear->inputs, bytes = panel_bytes(T, inputs, PANEL);
  const int64_t step = block_inputs(T) * bytes / inputs;
  if constexpr (!has_nibbles(T))  // two streams come faster from memory; nibbles are limited by their arithmetic
    for (; a.rows == 1 && begin + 2 <= end; begin += 2)
      quant_tile<T, 1, 2>(a, begin, 0, a.linear->data + begin * bytes + NEAR, step);
  const int blocks = (a.rows + MAX_ROWS - 1) / MAX_ROWS;
  for (; begin < end; ++begin) {
    for (int b = 0; b < blocks; ++b) {
      const int row = int(int64_t(a.rows) * b / blocks), rows = int(int64_t(a.rows) * (b + 1) / blocks) - row;
      const char* ahead = fetch_ahead(a, bytes, begin, end, b, blocks);
      with_rows(rows, [&](auto r) { quant_tile<T, r, 1>(a, begin, row, ahead, (step + blocks - 1) / blocks); });
    }
  }
}

void quant_gemm(const GemmArgs& a, int begin, int end) {
  switch (a.linear->type) {
    case Type::q8_0: return quant_gemm_of<Type::q8_0>(a, begin, end);
    case Type::q4_0: return quant_gemm_of<Type::q4_0>(a, begin, end);
    case Type::q4_1: return quant_gemm_of<Type::q4_1>(a, begin, end);
    case Type::q4_k: return quant_gemm_of<Type::q4_k>(a, begin, end);
#ifdef __AVX512VNNI__
    case Type::q8_quads: return quant_gemm_of<Type::q8_quads>(a, begin, end);
    case Type::q6_quads: return quant_gemm_of<Type::q6_quads>(a, begin, end);
#endif
    default: return quant_gemm_of<Type::q6_k>(a, begin, end);
  }
}
