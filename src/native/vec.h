// One register of W floats, 8 or 16, written with the vector extensions of GCC and Clang: elementwise operators are
// exact IEEE, so only `fma` differs between levels. Included inside a level's namespace, once per translation unit.

#ifndef WIDTH
#define WIDTH 8
#endif
constexpr int W = WIDTH;
typedef float F __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * W), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif
#if WIDTH == 16
#define REPEAT(x) x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x
#else
#define REPEAT(x) x, x, x, x, x, x, x, x
#endif

INLINE F load(const float* p) { return *reinterpret_cast<const F*>(p); }
INLINE void store(float* p, F v) { *reinterpret_cast<F*>(p) = v; }
INLINE F splat(float x) { return F{REPEAT(x)}; }
INLINE F max(F a, F b) { return a > b ? a : b; }

INLINE F fma(F a, F b, F c) {
#if WIDTH == 16
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The sum of the lanes, always in the same order.
INLINE float sum(F v) {
  float a[W];
  store(a, v);
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

// The largest lane.
INLINE float largest(F v) {
#if WIDTH == 16
  v = max(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = max(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
  v = max(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = max(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
  return v[0];
}

// Lane i of the result is the sum of v[i]'s lanes.
INLINE F sums(const F* v) {
  F pair[4], quad[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    pair[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
              SHUFFLE(v[2 * i], v[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    quad[i] = SHUFFLE(pair[2 * i], pair[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
              SHUFFLE(pair[2 * i], pair[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SHUFFLE(quad[0], quad[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         SHUFFLE(quad[0], quad[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// bf16 to fp32: widening W values that lie next to each other.
INLINE F widen(const uint16_t* p) {
#if WIDTH == 8 && defined(__AVX2__)  // which GCC makes of halves
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  typedef uint16_t H __attribute__((vector_size(2 * W), aligned(2), may_alias));
  return (F)(__builtin_convertvector(*reinterpret_cast<const H*>(p), U) << 16);
#endif
}

// e^x for x in [-87, 88], clamped outside; the Cephes polynomial, relative error about 1e-7.
INLINE F exp(F x) {
  x = max(x, splat(-87.0f));
  x = -max(-x, splat(-88.0f));
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F n = fma(x, splat(1.44269504f), magic) - magic;
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const I bits = (__builtin_convertvector(n, I) + 127) << 23;
  return p * (F)bits;
}

INLINE F silu(F x) { return x / (splat(1.0f) + exp(-x)); }

// By the tanh formula: x (1 + tanh(y)) / 2 = x / (1 + e^-2y).
INLINE F gelu(F x) {
  const F cubic = fma(x * x * x, splat(0.044715f), x);
  return x / (splat(1.0f) + exp(cubic * splat(-1.5957691216f)));
}
