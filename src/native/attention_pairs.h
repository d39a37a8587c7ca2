// Tree attention as in attention.h, over bf16 K/V by an instruction that multiplies pairs of bf16: queries and the softmax's
// weights are rounded to meet them. A chunk's keys lie transposed, one to a lane, so that a query takes its scores without
// sums across lanes, and its values lie in pairs of keys. Included inside a level's namespace.

#include "attention_walk.h"

constexpr int PAIRS = KEY_CHUNK / 2;

INLINE F add_pairs_of(F sums, U a, U b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
INLINE U load_words(const void* p) { return (U)_mm512_loadu_si512(p); }
INLINE void store_words(uint32_t* p, U v) { _mm512_storeu_si512(p, (__m512i)v); }
// The larger of 32 bf16 without their signs, times 2: from ODD on infinite or no number.
INLINE __m512i larger(__m512i doubled, __m512i x) { return _mm512_max_epu16(doubled, _mm512_slli_epi16(x, 1)); }
constexpr uint16_t ODD = 0xff00;
INLINE U splat_words(uint32_t x) { return U{REPEAT(x)}; }

// Row i's lane j to row j's lane i.
INLINE void transpose(U* x) {
  U y[W];
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    const U a = (U)_mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    const U b = (U)_mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    const U c = (U)_mm512_unpacklo_epi32((__m512i)x[i + 2], (__m512i)x[i + 3]);
    const U d = (U)_mm512_unpackhi_epi32((__m512i)x[i + 2], (__m512i)x[i + 3]);
    y[i] = (U)_mm512_unpacklo_epi64((__m512i)a, (__m512i)c);
    y[i + 1] = (U)_mm512_unpackhi_epi64((__m512i)a, (__m512i)c);
    y[i + 2] = (U)_mm512_unpacklo_epi64((__m512i)b, (__m512i)d);
    y[i + 3] = (U)_mm512_unpackhi_epi64((__m512i)b, (__m512i)d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4((__m512i)y[i], (__m512i)y[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4((__m512i)y[i + 8], (__m512i)y[i + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4((__m512i)y[i], (__m512i)y[i + 4], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4((__m512i)y[i + 8], (__m512i)y[i + 12], 0xdd);
    x[i] = (U)_mm512_shuffle_i32x4(a, b, 0x88);
    x[i + 4] = (U)_mm512_shuffle_i32x4(c, d, 0x88);
    x[i + 8] = (U)_mm512_shuffle_i32x4(a, b, 0xdd);
    x[i + 12] = (U)_mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

// e^x for x <= 0, good to 1e-4, since it will be rounded to bf16; 0 from -128 down.
INLINE F weigh(F x) {
  x = max(x, splat(-128.0f)) * splat(1.44269504f);
  const F n = _mm512_roundscale_ps(x, 8), r = x - n;
  F p = fma(splat(9.6706240e-3f), r, splat(5.5504109e-2f));
  p = fma(p, r, splat(2.4022651e-1f));
  p = fma(p, r, splat(6.9314718e-1f));
  return _mm512_scalef_ps(fma(p, r, splat(1.0f)), n);
}

INLINE float sum_lanes(F v) {
  v = v + SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v = v + SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v = v + SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return v[0] + v[1];
}

// The keys and values of one chunk. What a query does not see weighs 0, or is taken away where it is not finite.
struct PairedChunk {
  const AttentionArgs& a;
  int kv_head;
  uint32_t* keys;    // [head_dim / 2, KEY_CHUNK], two dimensions each
  uint32_t* values;  // [PAIRS, head_dim], of two keys each
  uint32_t* q;       // [queries, head_dim / 2], two dimensions each
  float* states;     // [queries, W + head_dim]: each lane's sum of weights, the weighted values
  float* totals;     // likewise, of the blocks before
  float top[QUERY_BLOCK], total_top[QUERY_BLOCK];  // the largest scores so far
  int64_t slot[KEY_CHUNK];
  bool filled[2];    // halves of the lanes; what lies there before may be no numbers
  bool odd[2];       // whether values there are not finite

  int stride() const { return W + a.head_dim; }

  void begin(int i, const float* x) {
    uint16_t* to = reinterpret_cast<uint16_t*>(q + i * a.head_dim / 2);
    for (int d = 0; d < a.head_dim; d += W) store_halves(to + d, round_to_bf16(load(x + d)));
    total_top[i] = -__builtin_inff();
  }

  void restart(int i) {
    top[i] = -__builtin_inff();
    for (int d = 0; d < stride(); d += W) store(states + i * stride() + d, splat(0.0f));
  }

  void fold(int i) {
    const float *state = states + i * stride(), old = total_top[i];
    float* total = totals + i * stride();
    if (top[i] == -__builtin_inff()) return;
    const bool first = old == -__builtin_inff();
    const float now = total_top[i] = first || top[i] > old ? top[i] : old;
    const F keep = weigh(splat(old - now)), scale = weigh(splat(top[i] - now));
    for (int d = 0; d < stride(); d += W)
      store(total + d, first ? load(state + d) : load(total + d) * keep + load(state + d) * scale);
  }

  void save(int i, float* part) const {
    part[0] = top[i];
    __builtin_memcpy(part + W, states + i * stride(), 4 * stride());
  }

  void resume(int i, const float* part) {
    top[i] = part[0];
    __builtin_memcpy(states + i * stride(), part + W, 4 * stride());
  }

  void finish(int i, float* out) const {
    const float* total = totals + i * stride();
    const F weights = splat(sum_lanes(load(total)));
    for (int d = 0; d < a.head_dim; d += W) store(out + d, load(total + W + d) / weights);
  }

  void clear() {
    for (int j = 0; j < KEY_CHUNK; ++j) slot[j] = -1;
  }

  const uint16_t* row(const void* pool, int j) const {
    return static_cast<const uint16_t*>(pool) + (slot[j] * a.kv_heads + kv_head) * a.head_dim;
  }

  // Lanes from `first` on, W of them, hold what `slot` says.
  void fill(int first) {
    for (int d = 0; d < a.head_dim / 2; d += W) {
      U x[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j)
        x[j] = slot[first + j] < 0 ? U{} : load_words(row(a.keys, first + j) + 2 * d);
      transpose(x);
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) store_words(keys + (d + j) * KEY_CHUNK + first, x[j]);
    }
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i doubled{};
    for (int j = first; j < first + W; j += 2)
      for (int d = 0; d < a.head_dim; d += 2 * W) {
        const __m512i even = slot[j] < 0 ? __m512i{} : _mm512_loadu_si512(row(a.values, j) + d);
        const __m512i odd_row = slot[j + 1] < 0 ? __m512i{} : _mm512_loadu_si512(row(a.values, j + 1) + d);
        doubled = larger(larger(doubled, even), odd_row);
        uint32_t* to = values + j / 2 * a.head_dim + d;
        store_words(to, (U)_mm512_permutex2var_epi16(even, low, odd_row));
        store_words(to + W, (U)_mm512_permutex2var_epi16(even, high, odd_row));
      }
    odd[first / W] = _mm512_cmpge_epu16_mask(doubled, _mm512_set1_epi16(int16_t(ODD))) != 0;
  }

  void set(const int64_t* slots) {
    for (int half = 0; half < 2; ++half) {
      bool changed = !filled[half];
      for (int j = half * W; j < (half + 1) * W; ++j)
        if (slots[j] >= 0 && slots[j] != slot[j]) {
          slot[j] = slots[j];
          changed = true;
        }
      if (changed) fill(half * W);
      filled[half] = true;
    }
  }

  // Zeroes the values that are not among first to last - 1, until they are filled again.
  void hide(int first, int last) {
    uint16_t* halves = reinterpret_cast<uint16_t*>(values);
    for (int j = 0; j < KEY_CHUNK; ++j)
      for (int d = 0; (j < first || j >= last) && d < a.head_dim; ++d) halves[(j / 2 * a.head_dim + d) * 2 + j % 2] = 0;
  }

  void attend(int i, int queries, int first, int last);
};

// Shows keys first to last - 1 of a chunk to N queries from the i-th on.
template <int N>
static void attend_pairs(PairedChunk& c, int i, int first, int last) {
  const int dim = c.a.head_dim, stride = c.stride();
  const uint32_t* q = c.q + i * dim / 2;
  float *state = c.states + i * stride, *top = c.top + i;
  F even[N][2], odd[N][2];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) even[n][0] = even[n][1] = odd[n][0] = odd[n][1] = splat(0.0f);
  for (int d = 0; d < dim / 2; d += 2) {
    const uint32_t* k = c.keys + d * KEY_CHUNK;
    const U a = load_words(k), b = load_words(k + W), e = load_words(k + 2 * W), f = load_words(k + 3 * W);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const U x = splat_words(q[n * dim / 2 + d]), y = splat_words(q[n * dim / 2 + d + 1]);
      even[n][0] = add_pairs_of(even[n][0], x, a);
      even[n][1] = add_pairs_of(even[n][1], x, b);
      odd[n][0] = add_pairs_of(odd[n][0], y, e);
      odd[n][1] = add_pairs_of(odd[n][1], y, f);
    }
  }
  const uint32_t seen = uint32_t(((uint64_t(1) << last) - 1) & ~((uint64_t(1) << first) - 1));
  const __mmask16 seen_low = __mmask16(seen), seen_high = __mmask16(seen >> W);
  const F scale = splat(c.a.scale), none = splat(-__builtin_inff());
  const U ones = splat_words(0x3f803f80);
  alignas(64) uint32_t weight[N][PAIRS];
  float keep[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    even[n][0] = _mm512_mask_mul_ps(none, seen_low, even[n][0] + odd[n][0], scale);
    even[n][1] = _mm512_mask_mul_ps(none, seen_high, even[n][1] + odd[n][1], scale);
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const float old = top[n], here = largest(max(even[n][0], even[n][1]));
    top[n] = here > old ? here : old;
    keep[n] = old - top[n];
    const F now = splat(top[n]);
    for (int half = 0; half < 2; ++half)
      _mm256_store_si256(reinterpret_cast<__m256i*>(weight[n] + half * W / 2),
                         (__m256i)_mm512_cvtneps_pbh(weigh(even[n][half] - now)));
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    keep[n] = weigh(splat(keep[n]))[0];
    float* sums = state + n * stride;
    store(sums, add_pairs_of(load(sums) * splat(keep[n]), load_words(weight[n]), ones));
  }
  const auto add_values = [&](auto width, int d) {
    constexpr int V = width;
    F y[N][V];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) y[n][v] = load(state + n * stride + W + d + v * W) * splat(keep[n]);
    for (int j = 0; j < PAIRS; ++j) {
      U values[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) values[v] = load_words(c.values + j * dim + d + v * W);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const U x = splat_words(weight[n][j]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) y[n][v] = add_pairs_of(y[n][v], x, values[v]);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(state + n * stride + W + d + v * W, y[n][v]);
  };
  int d = 0;
  for (; d + 4 * W <= dim; d += 4 * W) add_values(std::integral_constant<int, 4>(), d);
  if (d < dim) add_values(std::integral_constant<int, 2>(), d);
}

void PairedChunk::attend(int i, int queries, int first, int last) {
  const bool hides = (odd[0] || odd[1]) && (first > 0 || last < KEY_CHUNK);
  if (hides) hide(first, last);
  for (; queries >= 4; queries -= 4, i += 4) attend_pairs<4>(*this, i, first, last);
  if (queries == 3) attend_pairs<3>(*this, i, first, last);
  if (queries == 2) attend_pairs<2>(*this, i, first, last);
  if (queries == 1) attend_pairs<1>(*this, i, first, last);
  if (hides) filled[0] = filled[1] = false;
}

INLINE bool takes_pairs(const AttentionArgs& a) { return a.type == Type::bf16 && a.head_dim % (2 * W) == 0; }

INLINE PairedChunk paired_chunk_in(const AttentionArgs& a, int kv_head, float* scratch) {
  const int half = PAIRS * a.head_dim;
  uint32_t* words = reinterpret_cast<uint32_t*>(scratch);
  float* states = scratch + 2 * half + QUERY_BLOCK / 2 * a.head_dim;
  return PairedChunk{a, kv_head, words, words + half, words + 2 * half, states, states + QUERY_BLOCK * (W + a.head_dim),
                     {}, {}, {}, {}, {}};
}

void attention(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, int block, float* parts,
               float* scratch) {
  if (!takes_pairs(a)) return avx2_kernels().attention(a, span, kv_head, begin, end, block, parts, scratch);
  PairedChunk chunk = paired_chunk_in(a, kv_head, scratch);
  walk(a, span, kv_head, begin, end, block, parts, chunk);
}

void join(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, int blocks, const float* parts,
          float* scratch) {
  if (!takes_pairs(a)) return avx2_kernels().join(a, span, kv_head, begin, end, blocks, parts, scratch);
  PairedChunk chunk = paired_chunk_in(a, kv_head, scratch);
  join_parts(a, span, kv_head, begin, end, blocks, parts, chunk);
}
