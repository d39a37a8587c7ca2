// Tree attention with a running softmax in fp32. Included inside a level's namespace.

#include "attention_walk.h"

// The keys and values of one chunk, a row each. Neighbouring queries share most of them: only what differs from
// the query before is looked up again (and, for bf16, widened).
struct Chunk {
  const AttentionArgs& a;
  int kv_head;
  float* wide;    // [2, KEY_CHUNK, head_dim], for bf16
  float* states;  // [queries, head_dim + 2]: the largest score so far, the sum of weights, the weighted values
  float* totals;  // likewise, of the blocks before
  const float* q[QUERY_BLOCK];
  int64_t slot[KEY_CHUNK];
  const float* k[KEY_CHUNK];
  const float* v[KEY_CHUNK];

  int stride() const { return a.head_dim + 2; }

  void begin(int i, const float* x) {
    q[i] = x;
    totals[i * stride()] = -__builtin_inff();
  }

  void restart(int i) {
    float* state = states + i * stride();
    state[0] = -__builtin_inff();
    for (int d = 1; d < stride(); ++d) state[d] = 0.0f;
  }

  void fold(int i) {
    const float* state = states + i * stride();
    float* total = totals + i * stride();
    if (state[0] == -__builtin_inff()) return;
    const bool first = total[0] == -__builtin_inff();
    const float now = first || state[0] > total[0] ? state[0] : total[0];
    float keep[W], scale[W];
    store(keep, exp(splat(total[0] - now)));
    store(scale, exp(splat(state[0] - now)));
    total[0] = now;
    for (int d = 1; d < stride(); ++d) total[d] = first ? state[d] : total[d] * keep[0] + state[d] * scale[0];
  }

  void save(int i, float* part) const { __builtin_memcpy(part, states + i * stride(), 4 * stride()); }
  void resume(int i, const float* part) { __builtin_memcpy(states + i * stride(), part, 4 * stride()); }

  void finish(int i, float* out) const {
    const float* total = totals + i * stride();
    for (int d = 0; d < a.head_dim; ++d) out[d] = total[2 + d] / total[1];
  }

  void clear() {
    for (int j = 0; j < KEY_CHUNK; ++j) slot[j] = -1;
  }

  void set(const int64_t* slots) {
    for (int j = 0; j < KEY_CHUNK; ++j)
      if (slots[j] >= 0 && slots[j] != slot[j]) load_row(j, slots[j]);
  }

  void load_row(int j, int64_t s) {
    slot[j] = s;
    const int64_t at = (s * a.kv_heads + kv_head) * a.head_dim;
    if (a.type == Type::f32) {
      k[j] = static_cast<const float*>(a.keys) + at;
      v[j] = static_cast<const float*>(a.values) + at;
      return;
    }
    float* wide_k = wide + j * a.head_dim;
    float* wide_v = wide_k + KEY_CHUNK * a.head_dim;
    for (int d = 0; d < a.head_dim; d += W) {
      store(wide_k + d, widen(static_cast<const uint16_t*>(a.keys) + at + d));
      store(wide_v + d, widen(static_cast<const uint16_t*>(a.values) + at + d));
    }
    k[j] = wide_k;
    v[j] = wide_v;
  }

  void attend(int i, int queries, int first, int last) const;
};

constexpr int TOGETHER = 4;  // queries whose chains of dependent operations overlap

// The scores of keys first to last - 1, padded to whole registers with the last one's; returns the largest of each lane.
INLINE F score(const Chunk& c, const float* q, int first, int last, float* weight) {
  const int dim = c.a.head_dim, count = last - first;
  const float* const* keys = c.k + first;
  F top = splat(-__builtin_inff());
  for (int j = 0; j < count; j += W) {
    F dot[W];
    const float* row[W];
#pragma GCC unroll 8
    for (int i = 0; i < W; ++i) {
      row[i] = keys[j + i < count ? j + i : count - 1];
      dot[i] = splat(0.0f);
    }
    for (int d = 0; d < dim; d += W) {
      const F x = load(q + d);
#pragma GCC unroll 8
      for (int i = 0; i < W; ++i) dot[i] = fma(x, load(row[i] + d), dot[i]);
    }
    const F scores = sums(dot) * splat(c.a.scale);
    store(weight + j, scores);
    top = max(top, scores);
  }
  return top;
}

// Scores to weights, relative to the largest score so far; returns what scales the sums before.
INLINE float soften(F top, int count, float* weight, float* state) {
  const float old = state[0], chunk_top = largest(top), now = chunk_top > old ? chunk_top : old;
  F part = splat(0.0f);
  for (int j = 0; j < count; j += W) {
    store(weight + j, exp(load(weight + j) - splat(now)));
    for (int i = count - j; i < W; ++i) weight[j + i] = 0.0f;
    part = part + load(weight + j);
  }
  float shrink[W];
  store(shrink, exp(splat(old - now)));
  const float keep = old == -__builtin_inff() ? 0.0f : shrink[0];
  state[0] = now;
  state[1] = state[1] * keep + sum(part);
  return keep;
}

INLINE void add_values(const Chunk& c, int first, int count, const float* weight, float keep, float* acc) {
  const int dim = c.a.head_dim;
  const float* const* values = c.v + first;
  int d = 0;
  for (; d + 8 * W <= dim; d += 8 * W) {
    F y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) y[i] = load(acc + d + i * W) * splat(keep);
    for (int j = 0; j < count; ++j) {
      const F p = splat(weight[j]);
      const float* v = values[j] + d;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) y[i] = fma(p, load(v + i * W), y[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store(acc + d + i * W, y[i]);
  }
  for (; d < dim; d += W) {
    F y = load(acc + d) * splat(keep);
    for (int j = 0; j < count; ++j) y = fma(splat(weight[j]), load(values[j] + d), y);
    store(acc + d, y);
  }
}

void Chunk::attend(int i, int queries, int first, int last) const {
  const int stride = a.head_dim + 2;
  float* state = states + i * stride;
  alignas(64) float weight[TOGETHER][KEY_CHUNK];
  F top[TOGETHER];
  float keep[TOGETHER];
  for (int n; queries > 0; queries -= n, i += n, state += n * stride) {
    n = queries < TOGETHER ? queries : TOGETHER;
    for (int j = 0; j < n; ++j) top[j] = score(*this, q[i + j], first, last, weight[j]);
    for (int j = 0; j < n; ++j) keep[j] = soften(top[j], last - first, weight[j], state + j * stride);
    for (int j = 0; j < n; ++j) add_values(*this, first, last - first, weight[j], keep[j], state + j * stride + 2);
  }
}

INLINE Chunk chunk_in(const AttentionArgs& a, int kv_head, float* scratch) {
  float* states = scratch + 2 * KEY_CHUNK * a.head_dim;
  return Chunk{a, kv_head, scratch, states, states + QUERY_BLOCK * (a.head_dim + 2), {}, {}, {}, {}};
}

void attention(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, int block, float* parts,
               float* scratch) {
  Chunk chunk = chunk_in(a, kv_head, scratch);
  walk(a, span, kv_head, begin, end, block, parts, chunk);
}

void join(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, int blocks, const float* parts,
          float* scratch) {
  Chunk chunk = chunk_in(a, kv_head, scratch);
  join_parts(a, span, kv_head, begin, end, blocks, parts, chunk);
}
